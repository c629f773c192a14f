"""The loop that chooses an implementation."""

import jax
import pytest

from pallas_kernels.dispatch import dispatch


def refuses(*args: object, platform: str) -> str:
    raise NotImplementedError(f"no {args} on {platform}")


def refuses_too(*args: object, platform: str) -> str:
    raise NotImplementedError("needs a mesh")


def runs(*args: object, platform: str) -> tuple[object, ...]:
    return ("runs", *args, platform)


def runs_too(*args: object, platform: str) -> str:
    return "runs too"


def is_broken(*args: object, platform: str) -> str:
    raise RuntimeError("broken")


def test_the_first_that_takes_the_arguments_runs():
    implementations = {"a": refuses, "b": runs, "c": runs_too}
    assert dispatch("op", implementations, 1, 2, platform="tpu") == ("runs", 1, 2, "tpu")


def test_the_platform_is_by_default_that_of_the_default_backend():
    assert dispatch("op", {"a": runs}) == ("runs", jax.default_backend())


def test_a_named_implementation_runs_though_an_earlier_one_would():
    assert dispatch("op", {"a": runs, "b": runs_too}, implementation="b") == "runs too"


def test_a_named_implementation_that_refuses_raises_though_another_would_run():
    with pytest.raises(NotImplementedError, match=r"^no \(1,\) on gpu$"):
        dispatch("op", {"a": refuses, "b": runs}, 1, platform="gpu", implementation="a")


def test_an_unknown_name_lists_the_names():
    with pytest.raises(ValueError, match=r"^`implementation` of `op` must be one of `a`, `b`, got 'c'$"):
        dispatch("op", {"a": runs, "b": runs}, implementation="c")


def test_every_reason_is_reported_if_all_refuse():
    with pytest.raises(ExceptionGroup) as raised:
        dispatch("op", {"a": refuses, "b": refuses_too}, 1, platform="tpu")
    assert raised.value.message == (
        "no implementation of `op` takes these arguments on 'tpu' (`a`: no (1,) on tpu; `b`: needs a mesh)"
    )
    assert [type(reason) for reason in raised.value.exceptions] == [NotImplementedError, NotImplementedError]
    assert [str(reason) for reason in raised.value.exceptions] == ["no (1,) on tpu", "needs a mesh"]
    assert [reason.__notes__ for reason in raised.value.exceptions] == [
        ["implementation `a` of `op`"],
        ["implementation `b` of `op`"],
    ]


def test_an_error_that_is_no_refusal_is_not_swallowed():
    with pytest.raises(RuntimeError, match="broken"):
        dispatch("op", {"a": is_broken, "b": runs})
