"""JSON bodies that are none, and fields of a wrong kind."""

import pytest

from moe_edge.serve.errors import CODES, ApiError, shown
from moe_edge.serve.fields import (
    MAX_DEPTH,
    flag,
    number,
    one_of,
    read_fields,
    read_object,
    text,
    token_ids,
    whole,
)


@pytest.mark.parametrize(
    "body, fault",
    [
        (b"", "Expecting value at column 1"),
        (b"{", "Expecting property name"),
        (b'{"a": 1} x', "Extra data"),
        (b"null", "the body is null, expected an object"),
        (b"true", "the body is true, expected an object"),
        (b"[1]", "the body is a list, expected an object"),
        (b"1", "the body is a number, expected an object"),
        (b'"a"', "the body is a string, expected an object"),
        (b'{"a": "\xff"}', "not UTF-8 text: byte 7 is 0xff"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8 text: byte 0 is 0xff"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' occurs twice"),
        (b'{"a": {"b": 1, "b": 1}}', "'b' occurs twice"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
        (b'{"a": -1e999}', "the number -1e999 is too large"),
        (b'{"a": 1' + 9999 * b"0" + b"}", "a number has too many digits"),
        (b'{"a": "\\ud83d"}', "a text holds half a character"),
        (b'{"\\uDE00": 1}', "a text holds half a character"),
        (b"[" * 200_000, f"nested deeper than {MAX_DEPTH}"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, f"nested deeper than {MAX_DEPTH}"),
    ],
)
def test_read_object_rejects_body(body, fault):
    with pytest.raises(ApiError) as caught:
        read_object(body)
    assert (caught.value.code, caught.value.status) == ("invalid_json", 400)
    assert fault in caught.value.message
    assert len(caught.value.message) < 400


def test_read_object_reads_whole_characters_and_depth():
    assert read_object(b'{"a": "\\ud83e\\udd8a", "b": []}') == {"a": "🦊", "b": []}
    read_object(b'{"a":' * 16 + b"1" + b"}" * 16)


@pytest.mark.parametrize(
    "reader, value, expected",
    [
        (whole(1, 4), 0, "x is 0, expected a whole number in 1..4"),
        (whole(1, 4), 5, "x is 5, expected"),
        (whole(1, 4), True, "x is True, expected"),
        (whole(1, 4), 2.0, "x is 2.0, expected"),
        (whole(1, 4), "2", "x is '2', expected"),
        (whole(1, 4), 10**4000, r"x is 10+\.\.\., expected"),
        (number(0, 2), 2.1, "x is 2.1, expected a number from 0 to 2"),
        (number(0, 1, above=True), 0, "x is 0, expected a number more than 0 and at"),
        (number(0, 2), False, "x is False, expected"),
        (flag, 1, "x is 1, expected true or false"),
        (text, 1, "x is 1, expected a string"),
        (one_of("a", "b"), ["a"], r"x is \['a'\], expected one of a, b"),
        (token_ids(9), "1", "x is '1', expected a list of token ids"),
        (token_ids(9), [1, 9], r"x is 9, expected token ids in 0\.\.8"),
        (token_ids(9), [-1], "x is -1, expected"),
        (token_ids(9), [True], "x is True, expected"),
        (token_ids(9), [[1]], r"x is \[1\], expected"),
    ],
)
def test_reader_rejects_value(reader, value, expected):
    with pytest.raises(ApiError, match=expected) as caught:
        reader("x", value)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "x")


def test_readers_take_the_ends_of_their_ranges():
    assert [whole(1, 4)("x", n) for n in (1, 4)] == [1, 4]
    assert [number(0, 2)("x", n) for n in (0, 2, 0.5)] == [0.0, 2.0, 0.5]
    assert number(0, 1, above=True)("x", 1) == 1.0
    assert token_ids(9)("x", [0, 8]) == (0, 8)


def read(**given):
    return read_fields(given, {"n": whole(1, 2)}, {"p": 0, "q": None}, ("user",))


def test_read_fields_takes_null_and_neutral_for_left_out():
    assert read(n=2, p=0, q=None, user={"any": 1}) == {"n": 2}
    assert read(n=None, p=None) == {}
    assert read(p=0.0) == {}


@pytest.mark.parametrize(
    "given, code, param, message",
    [
        ({"p": 1}, "unsupported_parameter", "p", "got 1, expected 0 or none"),
        ({"p": False}, "unsupported_parameter", "p", "got False, expected 0 or"),
        ({"q": 0}, "unsupported_parameter", "q", "got 0, expected null or none"),
        ({"top_k": 1}, "unknown_parameter", "top_k", "unknown parameter top_k; leave"),
        ({"x" * 99: 1}, "unknown_parameter", "x" * 56 + "..", "unknown parameter xxx"),
        ({"n": 3}, "invalid_value", "n", "n is 3"),
    ],
)
def test_read_fields_rejects_field(given, code, param, message):
    with pytest.raises(ApiError) as caught:
        read(**given)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert message in caught.value.message


def test_error_has_the_shape_of_openai():
    error = ApiError("invalid_value", "n is 0", param="n")
    assert error.body() == {
        "error": {
            "message": "n is 0",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        }
    }
    assert (error.status, error.headers) == (400, {})


def test_error_statuses_and_headers_go_with_their_codes():
    statuses = {code: ApiError(code, "x").status for code in CODES}
    assert [code for code, status in statuses.items() if status >= 500] == [
        *("engine_error", "loading", "draining", "engine_failed", "deadline_exceeded"),
    ]
    for code, status in statuses.items():
        retry = "Retry-After" in ApiError(code, "x").headers
        assert retry == (status in (429, 503))
    assert ApiError("deadline_exceeded", "x").headers == {"x-should-retry": "false"}
    later = ApiError("queue_full", "x", headers={"Retry-After": "9"})
    assert later.headers == {"Retry-After": "9"}


def test_shown_is_short_and_whole():
    assert shown("a") == "'a'"
    assert len(shown("a" * 100)) == 60
    shown("\ud800é").encode("utf-8")
