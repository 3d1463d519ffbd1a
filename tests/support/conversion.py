"""Converting in tests, and comparing the tensors of two folders."""

from safetensors.numpy import load_file

from moe_edge.convert.convert import convert_checkpoint


def convert(src, dst, **options):
    return convert_checkpoint(src, dst, progress=False, **options)


def load_all(folder) -> dict:
    return {
        name: array
        for path in folder.glob("*.safetensors")
        for name, array in load_file(path).items()
    }


def assert_same_tensors(got: dict, expected: dict) -> None:
    assert sorted(got) == sorted(expected)
    for name, array in expected.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape
        assert got[name].tobytes() == array.tobytes(), name
