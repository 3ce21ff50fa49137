"""Builds the file tree of a container image in a folder and restores a photo in it, where no container engine is.

    python docker/tree.py onnx-cpu FOLDER
    python docker/tree.py torch-cpu FOLDER

The tree holds Python, the packages, their system libraries and the weights, and nothing else: no shell, no compiler. As
root the photo is restored inside it by chroot, as a user who can write to /out alone (and to /tmp for torch-cpu, whose
PyTorch unpacks its package there), and the health check of the Dockerfile must pass, but not where it has to fail.
Prints sizes and seconds as JSON; run it with the Python to be put into the tree,
where gpen-core is installed with its `convert` extra and, for torch-cpu, a C++ compiler is at hand.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import stat
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
USER = 10001
LEFT_OUT = ("site-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "lib2to3", "turtledemo", "__pycache__")
# What each image installs beside the package itself, the format of its weights, and whether bytecode is worth its room:
# PyTorch has thousands of modules to import.
VARIANTS = {
    "onnx-cpu": ("requirements-onnx.txt", "onnx", "--no-compile"),
    "torch-cpu": ("docker/requirements-torch.txt", "pt2", "--compile"),
}
RUNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="gpen-open-512")
    arguments = parser.parse_args()
    tree = arguments.folder.absolute()
    if tree.exists():
        sys.exit(f"{tree} exists already")
    build(arguments.variant, tree, arguments.model)
    measured = {"variant": arguments.variant, "megabytes": sizes(tree)}
    if os.geteuid() == 0:
        measured |= restore(arguments.variant, tree)
        require_health(arguments.variant, tree)
    print(json.dumps(measured, indent=1))


def build(variant: str, tree: Path, model: str) -> None:
    requirements, kind, bytecode = VARIANTS[variant]
    library = tree / "usr/local/lib" / VERSION
    base = Path(sys.base_prefix)
    shutil.copytree(
        base / "lib" / VERSION, library, ignore=shutil.ignore_patterns(*LEFT_OUT, "config-*"), symlinks=True
    )
    python = tree / "usr/local/bin/python3"
    python.parent.mkdir(parents=True)
    shutil.copyfile(Path(sys.executable).resolve(), python)
    python.chmod(0o755)
    site = library / "site-packages"
    # What pip needs to build the package stays out of the tree.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", bytecode, "--target", str(site)]
    constraints = tree / "constraints.txt"
    # The headless build of OpenCV has the same versions under another name.
    constraints.write_text((ROOT / "constraints.txt").read_text().replace("opencv-python=", "opencv-python-headless="))
    subprocess.run([*pip, "-c", str(constraints), "-r", str(ROOT / requirements)], check=True, stdout=sys.stderr)
    constraints.unlink()
    subprocess.run([*pip, "--no-deps", str(ROOT)], check=True, stdout=sys.stderr)
    bake(tree / "weights", model, kind)
    for name, mode in (("out", 0o777), ("tmp", 0o777 if kind == "pt2" else 0o755), ("in", 0o755), ("proc", 0o755)):
        (tree / name).mkdir()
        (tree / name).chmod(mode)
    # A container has the whole of /proc; only this file of it is read.
    shutil.copyfile("/proc/cpuinfo", tree / "proc/cpuinfo")
    shutil.copyfile(ROOT / "examples/astronaut_degraded.jpg", tree / "in/photo.jpg")
    make_devices(tree / "dev")
    copy_libraries(tree)


def make_devices(folder: Path) -> None:
    """What every container has and PyTorch asks for. Only root can."""
    folder.mkdir()
    if os.geteuid() == 0:
        for name, minor in (("null", 3), ("urandom", 9)):
            os.mknod(folder / name, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
            (folder / name).chmod(0o666)


def bake(folder: Path, model: str, kind: str) -> None:
    """The exported model and the detector, as an image's build stage makes them."""
    folder.mkdir()
    core = [sys.executable, "-m", "gpen_core"]
    exporting = [*core, "export", model, "--format", kind, "-o", str(folder / f"model.{kind}")]
    subprocess.run(exporting, check=True, stdout=sys.stderr)
    found = subprocess.run([*core, "weights", "pull", "centerface"], check=True, capture_output=True, text=True)
    shutil.copyfile(found.stdout.split()[-1], folder / "centerface.onnx")


def copy_libraries(tree: Path) -> None:
    """Every system library that a program or library of the tree asks for, at its own path."""
    for path in [tree / "usr/local/bin/python3", *tree.rglob("*.so"), *tree.rglob("*.so.*")]:
        listed = subprocess.run(["ldd", str(path)], check=False, capture_output=True, text=True).stdout
        for found in re.findall(r"(?:=> |^\s)(/\S+) \(0x", listed, re.MULTILINE):
            target = tree / found.lstrip("/")
            if not found.startswith(str(tree)) and not target.exists():
                # Where the loader looks without being told: Python's own library may lie elsewhere here.
                place = target if found.startswith(("/lib", "/usr/lib")) else tree / "usr/lib" / target.name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(found, place)
                place.chmod(0o755)


def sizes(tree: Path) -> dict[str, float]:
    """Of the whole tree and of its parts, in 10^6 bytes."""

    def total(folder: Path) -> float:
        return round(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink()) / 1e6, 1)

    site = tree / "usr/local/lib" / VERSION / "site-packages"
    return {"all": total(tree), "packages": total(site), "weights": total(tree / "weights")}


def restore(variant: str, tree: Path) -> dict[str, float]:
    """Median seconds of `--help` and of a whole restoration, each from the start of the process to its end."""
    kind = VARIANTS[variant][1]
    python = ["/usr/local/bin/python3", "-m", "gpen_core"]
    weights = ["--weights", f"/weights/model.{kind}", "--detector", "/weights/centerface.onnx"]
    photo = ["enhance", "/in/photo.jpg", "-o", "/out/photo.png", *weights]
    return {"help_seconds": clock(tree, [*python, "--help"]), "photo_seconds": clock(tree, [*python, *photo])}


def require_health(variant: str, tree: Path) -> None:
    """Ends the process unless the health check passes, and fails where the weights are damaged or can't be unpacked."""
    dockerfile = (ROOT / f"docker/{variant}.Dockerfile").read_text()
    arguments = json.loads(dockerfile.partition("HEALTHCHECK")[2].partition("CMD ")[2].partition("\n")[0])
    weights, folder = tree / arguments[-1].lstrip("/"), tree / "tmp"
    content, mode = weights.read_bytes(), stat.S_IMODE(folder.stat().st_mode)

    def check(state: str, good: bool) -> None:
        done = enter(tree, ["/usr/local/bin/python3", "-m", "gpen_core", *arguments[1:]])
        if (done.returncode == 0) != good:
            sys.exit(f"health check: {done.returncode}, {state}\n{done.stdout}{done.stderr}")

    check("with nothing wrong", True)
    weights.write_bytes(content[: len(content) // 2])
    check("with half of the weights", False)
    weights.write_bytes(content)
    if weights.suffix == ".pt2":
        folder.chmod(0o755)
        check("with nothing writable to unpack in", False)
        folder.chmod(mode)


def enter(tree: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """A command in the tree, as the user of an image."""
    chroot = shutil.which("chroot") or "/usr/sbin/chroot"
    return subprocess.run(
        [chroot, f"--userspec={USER}:{USER}", str(tree), *command],
        check=False,
        capture_output=True,
        text=True,
        env={"PYTHONDONTWRITEBYTECODE": "1", "GPEN_CORE_HOME": "/weights"},
    )


def clock(tree: Path, command: list[str]) -> float:
    seconds = []
    for _ in range(RUNS):
        started = time.perf_counter()
        done = enter(tree, command)
        seconds.append(time.perf_counter() - started)
        if done.returncode or done.stderr:
            sys.exit(f"{' '.join(command)}: {done.returncode}\n{done.stderr}")
    return round(statistics.median(seconds), 2)


if __name__ == "__main__":
    main()
