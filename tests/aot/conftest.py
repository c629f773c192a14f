"""Children that compile start together once the tests of a session are known, and end with it.

Where pytest-xdist shares the tests among processes, each of these knows all tests and runs some: there a child starts
when a test asks for it.
"""

import pytest

from tests.aot.children import Child, Children

_CHILDREN = pytest.StashKey[Children]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_CHILDREN] = Children()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts the children that tests name by parameters, their own or those of their fixtures."""
    if session.config.option.collectonly or hasattr(session.config, "workerinput"):
        return
    for item in session.items:
        if not any(mark.args[0] for mark in item.iter_markers("skipif")):
            for child in _named_by(item):
                session.config.stash[_CHILDREN].start(child)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_CHILDREN].close()


def pytest_make_parametrize_id(val: object) -> str | None:
    return " ".join(val.arguments) if isinstance(val, Child) else None


@pytest.fixture(scope="session")
def children(pytestconfig: pytest.Config) -> Children:
    return pytestconfig.stash[_CHILDREN]


def _named_by(item: pytest.Item) -> list[Child]:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return [value for value in parameters.values() if isinstance(value, Child)]
