"""Fixtures for all tests."""

import ctypes
import gc
import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
import torch
from aiohttp import web_app
from tests import examples

from infer_server.http.children import give_back

# A shell has what it starts in the background ignore SIGINT, and all that this starts in turn, such as the agents that
# tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tiny tensors gain nothing from a second thread, and its spinning costs whatever runs beside.
torch.set_num_threads(1)
# oneDNN would keep what it compiled for the last 1024 shapes, and what calls it as many again. Tests have thousands of
# shapes: half a gigabyte.
os.environ |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
# glibc gives every thread a heap of its own, which keeps what was freed there. Servers have many threads.
if hasattr(libc := ctypes.CDLL(None), "mallopt"):
    libc.mallopt(-8, 1)  # M_ARENA_MAX
# Pytest's own start takes half the time without the plugins of libraries that only clients' tests need. pyproject.toml
# leaves them out here, and this does in each pytest that a test starts.
os.environ["PYTEST_ADDOPTS"] = "-p no:langsmith_plugin -p no:schemathesis"
# aiohttp's cache would keep the last 1024 applications, and with each its engine.
web_app._cached_build_middleware = web_app._build_middlewares  # type: ignore[assignment]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--explore", type=int, metavar="SEED", help="draw examples from this seed, and more of them")
    for plugin in ("tests.again", "tests.costs"):
        pluginmanager.import_plugin(plugin)
    # Where pytest-asyncio is not installed, its settings in pyproject.toml are no mistake.
    if not pluginmanager.hasplugin("asyncio"):
        for name in ("asyncio_mode", "asyncio_default_fixture_loop_scope"):
            parser.addini(name, "of pytest-asyncio, which is not installed")


def pytest_configure(config: pytest.Config) -> None:
    examples.fast = config.option.markexpr == "not slow"
    examples.explored = config.option.explore
    examples.use_profile()
    # What infer keeps between processes is not the user's own here. Workers have the variable from who started them.
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="infer-state-", ignore_cleanup_errors=True)
        os.environ["XDG_STATE_HOME"] = folder.name
        config.add_cleanup(folder.cleanup)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Python looks for garbage the less often the more objects stay. All tests and what they import stay, so they are
    not counted: else dropped servers and engines would pile up, a gigabyte in some files."""
    gc.collect()
    gc.freeze()
    gc.collect()  # counts again what stays


@pytest.fixture(scope="module", autouse=True)
def nothing_left_over() -> Iterator[None]:
    """A file's garbage, tensors in cycles above all, is gone before the next file begins, and so is what malloc keeps
    of it."""
    yield
    gc.collect()
    give_back()


def pytest_runtest_setup() -> None:
    examples.seed_everything()


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: before any of them is imported


@pytest.fixture(scope="module", params=[pytest.param("reference", marks=pytest.mark.slow), "native"])
def each_provider(request: pytest.FixtureRequest, monkeypatch_module: pytest.MonkeyPatch) -> None:
    """What ``tests.support`` makes computes with the reference kernels, then with the native ones."""
    from tests import support

    from infer_kernels_cpu.provider import CpuKernels

    if request.param == "native":
        monkeypatch_module.setattr(support, "KERNELS", CpuKernels())


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch
