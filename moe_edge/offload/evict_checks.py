"""What an eviction policy of another author may give back, refused by its name."""

import numpy as np

from moe_edge.core.checks import ConfigError
from moe_edge.core.plug_in_result import kind_of, wrong_result
from moe_edge.offload.evict_base import Eviction, State


def _what(policy: Eviction) -> str:
    return f"eviction policy {policy.name}"


def check_state(policy: Eviction, method: str, state) -> None:
    """Raises ConfigError for what is no state."""
    if not isinstance(state, dict) or "key_S" not in state:
        expected = "the state from now on, a dict with key_S"
        raise wrong_result(_what(policy), method, state, expected)


def check_value(policy: Eviction, state: State) -> None:
    """Raises ConfigError for worths that slots cannot be sorted by."""
    ranks = policy.ranks
    if ranks is not None and ranks not in state:
        raise ConfigError(
            f"{_what(policy)}: ranks is {ranks!r}, which is no array of its state; "
            f"expected one of {', '.join(state)} (per_block adds arrays)"
        )
    value_S, key_S = policy.value(state), state["key_S"]
    if value_S is None:
        return
    is_numbers = kind_of(value_S) in ("b", "i", "u", "f")
    if not is_numbers or value_S.shape != key_S.shape:
        expected = f"None or an array of {len(key_S)} numbers, one a slot"
        raise wrong_result(_what(policy), "value", value_S, expected)
    if np.isnan(np.asarray(value_S, np.float32)[key_S >= 0]).any():
        raise wrong_result(_what(policy), "value", value_S, "numbers that are not NaN")


def checked_victim(
    policy: Eviction, found, protected_S: np.ndarray, is_foreign: bool
) -> tuple[int, State]:
    """The slot to give up and the state from then on, of what `victim` returned.

    Args:
      protected_S: bool [S], the slots that it may not give up.
      is_foreign: whether the policy is another author's, whose form is not known.
    Raises:
      ConfigError: another form, or a slot that is protected or not there.
    """
    if is_foreign:
        if not isinstance(found, tuple) or len(found) != 2:
            raise wrong_result(_what(policy), "victim", found, "(slot, state)")
        check_state(policy, "victim", found[1])
    slot, state = found
    number = np.asarray(slot)
    is_number = number.ndim == 0 and number.dtype.kind in "iu"
    is_slot = is_number and bool(0 <= number < len(protected_S))
    if not is_slot or protected_S[number]:
        raise ConfigError(
            f"{_what(policy)} gave up slot {slot}, which is "
            "protected or not there; victim must choose among the others"
        )
    return int(slot), state
