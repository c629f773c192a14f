"""Checks the wheel and the source distribution of a folder, and uses the wheel in an empty environment.

    python -m build --outdir dist . && python -m tests.release.check_dist dist

What is in both is compared with the files of the repository. The wheel is installed without extras, and then with them;
each time it does what the documentation says. Needs a package index. Ends with a line for each step that went well, or
with the first one that did not.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.pages import ROOT, blocks

PACKAGES = ("kvjax", "pallas_kernels")
EXTRAS = "metrics,plot,redis"
LIGHT = ("jax", "flax", "matplotlib", "prometheus_client", "redis", "tensorstore", "transformers")
GEOMETRY = '{"groups": [{"name": "full", "kind": "full", "tokens_per_block": 16, "block_bytes": 65536}]}'
# A program of someone who has types checked; every name is used as the documentation says.
CONSUMER = """
from typing import assert_type

import jax

import kvjax
from kvjax import fused


def serve(offloader: kvjax.Offloader, caches: dict[str, jax.Array], prompt: list[int]) -> int:
    found: kvjax.Lookup = offloader.lookup("a", prompt)
    caches, job = offloader.load(caches, "a", {"full": range(8)})
    result: kvjax.JobResult = offloader.wait(job)
    caches, job = offloader.store(caches, "a", {"full": range(8)}, num_tokens=len(prompt), checkpoint=True)
    results: list[kvjax.JobResult] = offloader.wait()
    offloader.finish("a")
    stored: int = offloader.stats().groups[0].bytes_stored
    return found.hit_tokens + (result.valid_tokens or 0) + len(results) + stored


async def serve_async(offloader: kvjax.Offloader, job: kvjax.Job) -> None:
    assert_type(await offloader.wait_async(job), kvjax.JobResult)
    assert_type(await offloader.wait_async(timeout_s=1.0), list[kvjax.JobResult])


def serve_ranks(offloader: kvjax.RankedOffloader, job: kvjax.Job) -> None:
    assert_type(offloader.wait(job), kvjax.JobResult)
    assert_type(offloader.wait(timeout_s=1.0), list[kvjax.JobResult])


def serve_fused(offloader: kvjax.Offloader) -> kvjax.fused.FusedSteps:
    assert_type(kvjax.fused.bucket_of(3, [4]), int)
    return fused.FusedSteps(offloader)


def refuse(error: Exception) -> bool:
    kvjax.no_such_name  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    return isinstance(error, (kvjax.ranks.RanksError, kvjax.tiers.TierError, kvjax.pool.PolicyError))


def show(offloader: kvjax.Offloader) -> None:
    kvjax.register_metrics(offloader.stats, labels={"model": "m"})


spacing: int | None = kvjax.checkpoints.default_checkpoint_tokens(
    kvjax.resolve_chunking(kvjax.CacheLayout([kvjax.GroupSpec("full", kvjax.FullAttention(), 16, block_bytes=64)]))
)
first, stop = kvjax.law.needed(kvjax.SlidingWindow(8), 20)
leaves = [kvjax.LeafSpec("kv", (16, 64), "int8")]
layout = kvjax.CacheLayout([kvjax.GroupSpec("full", kvjax.FullAttention(), 16, leaves)])
hit: kvjax.Hit = kvjax.longest_hit(kvjax.resolve_chunking(layout, blocks_per_chunk={"full": 2}), 100, {"full": [0]})
"""


class Environment:
    """An empty virtual environment, and a folder in which its programs run.

    Args:
        folder: where both are made.
    """

    def __init__(self, folder: Path):
        venv.create(folder / "env", with_pip=True)
        self.bin = folder / "env" / "bin"
        self.cwd = folder / "cwd"
        self.cwd.mkdir()

    def run(self, program: str, *argv: str, code: int = 0) -> str:
        """Runs one of its programs and returns what it printed.

        Raises:
            SystemExit: it ended with another code, or wrote to standard error though all went well.
        """
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [self.bin / program, *argv], cwd=self.cwd, env=environ, capture_output=True, text=True, check=False
        )
        if done.returncode != code:
            sys.exit(f"{program} {' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout + (done.stderr if code else "")

    def install(self, *what: str) -> None:
        """Installs packages, and checks that all fit each other."""
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)
        self.run("python", "-m", "pip", "check")


def check(fact: bool, told: str) -> None:
    """Prints a fact, or ends with it where it is none."""
    if not fact:
        sys.exit(f"NOT SO: {told}")
    print(f"ok: {told}")


def check_wheel(wheel: Path, version: str) -> None:
    """Checks what is in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    info = f"kvjax-{version}.dist-info"
    check({name.split("/")[0] for name in held} == {*PACKAGES, info}, f"the wheel holds {' and '.join(PACKAGES)} only")
    ours = {str(path.relative_to(ROOT)): path.read_bytes() for path in _sources()}
    check({n: b for n, b in held.items() if not n.startswith(info)} == ours, "with the bytes of the repository")
    check(all(f"{package}/py.typed" in held for package in PACKAGES), "and is typed")
    check(f"{info}/licenses/LICENSE" in held, "and has the licence")
    metadata = held[f"{info}/METADATA"].decode()
    extras = set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE))
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    check(all(f"`{extra}`" in page for extra in extras), f"every extra is documented: {', '.join(sorted(extras))}")


def check_sdist(sdist: Path, version: str) -> None:
    """Checks what is in a source distribution."""
    with tarfile.open(sdist) as archive:
        held = {name.removeprefix(f"kvjax-{version}/") for name in archive.getnames()}
    wanted = {str(path.relative_to(ROOT)) for path in _sources()}
    for folder in ("docs", "examples", "tests"):
        wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.[pm][yd]")}
    wanted |= {"LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "mkdocs.yml", "pyproject.toml"}
    missing = sorted(wanted - held)
    check(not missing, f"the source distribution has code, tests, documentation and licence{missing or ''}")


def check_core(env: Environment, version: str) -> None:
    """Uses what is installed without extras."""
    check(env.run("kvjax", "--version") == f"kvjax {version}\n", f"kvjax --version says {version}")
    check(env.run("python", "-m", "kvjax", "--version") == f"kvjax {version}\n", "and so does python -m kvjax")
    (env.cwd / "geometry.json").write_text(GEOMETRY)
    check("holds a prefix of" in env.run("kvjax", "plan", "geometry.json", "--host-bytes", "1GiB"), "kvjax plan plans")
    loaded = f"import sys, kvjax; print([name for name in {LIGHT} if name in sys.modules])"
    check(env.run("python", "-c", loaded) == "[]\n", "importing kvjax loads neither JAX nor any extra")
    (env.cwd / "readme.py").write_text(
        re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    )
    check(env.run("python", "readme.py").startswith("96 "), "the loop of the README runs")
    told = env.run("kvjax", "tier", "usage", "file:///tmp/kvjax-no-tier", code=2)
    check("pip install 'kvjax[tiers]'" in told, "a tier without its package says what to install")


def check_extras(env: Environment) -> None:
    """Uses what is installed with extras: the tutorial's restart."""
    folder = env.cwd / "tier"
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    for block in blocks(page.replace("/tmp/kvjax-tutorial", str(folder))):
        if block.title:
            (env.cwd / block.title).write_text(block.body)
    first, second = env.run("python", "serve.py"), env.run("python", "serve.py")
    check(first.startswith("0 of 49") and second.startswith("48 of 49"), "a tier survives a restart")
    env.run("kvjax", "plan", "geometry.json", "--plot", "plan.svg")
    check((env.cwd / "plan.svg").stat().st_size > 1000, "kvjax plan draws")


def check_types(env: Environment) -> None:
    """Checks the types of a program that uses what is installed, where pyright is."""
    pyright = Path(sys.executable).parent / "pyright"
    if not pyright.exists():
        print("NOTE: no pyright here, so the types of a consumer were not checked")
        return
    (env.cwd / "consumer.py").write_text(CONSUMER)
    strict = {"typeCheckingMode": "strict", "reportUnnecessaryTypeIgnoreComment": True}
    (env.cwd / "pyrightconfig.json").write_text(json.dumps(strict))
    done = subprocess.run(
        [pyright, "--pythonpath", env.bin / "python", "consumer.py"],
        cwd=env.cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    check(done.returncode == 0, f"a consumer's types check: {done.stdout.strip()}")


def main(folder: Path) -> None:
    """Checks the distributions of a folder."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    version = re.findall(r'^__version__ = "(.*)"$', (ROOT / "kvjax" / "__init__.py").read_text(), re.MULTILINE)[0]
    check(wheel.name == f"kvjax-{version}-py3-none-any.whl", f"the wheel is {wheel.name}")
    check_wheel(wheel, version)
    check_sdist(sdist, version)
    with tempfile.TemporaryDirectory() as scratch:
        env = Environment(Path(scratch))
        env.install(str(wheel))
        check_core(env, version)
        check_types(env)
        env.install(f"{wheel}[{EXTRAS}]")
        check_extras(env)


def _sources() -> Iterator[Path]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
