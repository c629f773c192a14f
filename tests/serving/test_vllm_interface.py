"""The connector, and the stand-ins of the other tests, against vLLM's own classes, where vLLM is installed."""

import dataclasses
import importlib
import inspect

import pytest

from tests.serving import vllm_interface

pytest.importorskip("vllm", reason="vLLM is not installed: its classes cannot be compared")
pytestmark = pytest.mark.filterwarnings("ignore")


def real(name):
    found = importlib.import_module(vllm_interface.BASE)
    return getattr(found, name, None) or getattr(importlib.import_module(vllm_interface.METRICS), name)


def shape(function):
    """Names, kinds and whether there is a default, of the arguments of a function."""
    arguments = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default is not one.empty) for one in arguments]


def methods(cls):
    return {
        name: method
        for name, method in vars(cls).items()
        if inspect.isfunction(method) and (not name.startswith("_") or name == "__init__")
    }


@pytest.mark.parametrize(
    "stand_in", vllm_interface.CLASSES + vllm_interface.METRIC_CLASSES, ids=lambda cls: cls.__name__
)
def test_a_stand_in_has_what_the_real_class_has(stand_in):
    cls = real(stand_in.__name__)
    if dataclasses.is_dataclass(stand_in):
        assert {f.name for f in dataclasses.fields(stand_in)} == {f.name for f in dataclasses.fields(cls)}
    for name, method in methods(stand_in).items():
        theirs = getattr(cls, name)
        assert [one[0] for one in shape(method)] == [one[0] for one in shape(theirs)], name
    assert stand_in.__abstractmethods__ == cls.__abstractmethods__ if hasattr(cls, "__abstractmethods__") else True


def test_the_connector_answers_every_call_as_the_interface_declares_it():
    connector = importlib.import_module("kvjax.serving.vllm").KvjaxConnector
    base, hma = real("KVConnectorBase_V1"), real("SupportsHMA")
    assert issubclass(connector, base)
    assert issubclass(connector, hma)
    assert not connector.__abstractmethods__
    for name, method in methods(connector).items():
        declared = getattr(base, name, None) or getattr(hma, name, None)
        if name == "register_runner":  # tpu-inference's
            continue
        assert declared is not None, f"{name} is no method of the interface"
        assert shape(method) == shape(declared), name


def test_figures_are_what_the_interface_asks_for():
    telemetry = importlib.import_module("kvjax.serving.vllm.telemetry")
    for ours, theirs in (("KvjaxStats", "KVConnectorStats"), ("KvjaxPromMetrics", "KVConnectorPromMetrics")):
        assert issubclass(getattr(telemetry, ours), real(theirs))
        for name, method in methods(getattr(telemetry, ours)).items():
            assert shape(method) == shape(getattr(real(theirs), name)), name


def test_metadata_is_what_the_interface_asks_for():
    module = importlib.import_module("kvjax.serving.vllm.connector")
    assert isinstance(module.KvjaxMetadata(), real("KVConnectorMetadata"))
    assert isinstance(module.KvjaxWorkerMetadata(), real("KVConnectorWorkerMetadata"))
