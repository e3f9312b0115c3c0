"""What glue says where a package with kernels is not there, or is not as it was."""

from __future__ import annotations

import types

import pytest

from glue_compiler.ops import flash_attn4, optional_package, quack_products

PACKAGES = pytest.mark.parametrize("package", [flash_attn4, quack_products], ids=lambda module: module.PACKAGE)


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch):
    monkeypatch.setattr(flash_attn4, "_folder", lambda: None)  # which asks for modules of torch's
    for package in (flash_attn4, quack_products):
        package.unusable.cache_clear()
    yield
    for package in (flash_attn4, quack_products):
        package.unusable.cache_clear()


def installed(monkeypatch, load):
    monkeypatch.setattr(optional_package, "installed_version", lambda package: "4.0.0")
    monkeypatch.setattr(optional_package.importlib, "import_module", load)


def with_parameters(package, **changed: set[str]):
    wanted = package._PARAMETERS | changed
    return types.SimpleNamespace(
        **{name: eval(f"lambda {', '.join(sorted(taken))}: None") for name, taken in wanted.items()}
    )


@PACKAGES
def test_a_package_that_is_not_installed(package, monkeypatch):
    monkeypatch.setattr(optional_package, "installed_version", lambda package: None)
    assert package.unusable() == f"{package.PACKAGE} is not installed"


@PACKAGES
@pytest.mark.parametrize(
    "error",
    [OSError("libcuda.so.1: cannot open shared object file"), ModuleNotFoundError("No module named 'cutlass'")],
    ids=lambda error: type(error).__name__,
)
def test_a_package_that_fails_when_it_is_imported(package, error, monkeypatch):
    def load(name):
        raise error

    installed(monkeypatch, load)
    assert package.unusable() == f"{package.PACKAGE} 4.0.0 cannot be imported: {type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("package", "function", "missing"),
    [(flash_attn4, "_flash_attn_bwd", {"dout", "lse"}), (quack_products, "gemm", {"pingpong"})],
)
def test_a_package_whose_functions_take_other_arguments(package, function, missing, monkeypatch):
    taken = package._PARAMETERS[function] - missing
    installed(monkeypatch, lambda name: with_parameters(package, **{function: taken}))
    names = ", ".join(sorted(missing))
    assert package.unusable() == f"{function} of {package.PACKAGE} 4.0.0 takes no {names}; a newer glue may know it"


@PACKAGES
def test_a_package_that_is_as_it_was(package, monkeypatch):
    installed(monkeypatch, lambda name: with_parameters(package))
    assert package.unusable() is None


@PACKAGES
def test_a_package_that_is_too_old_is_not_imported(package, monkeypatch):
    monkeypatch.setattr(optional_package, "installed_version", lambda package: "0.6.4")
    assert package.unusable() == f"{package.PACKAGE} 0.6.4 is older than {package._LEAST}"


def test_a_beta_is_older_than_the_next_one(monkeypatch):
    for version, is_older in (("4.0.0b4", True), ("4.0.0b5", False), ("4.0.0b36", False), ("4.0.0", False)):
        monkeypatch.setattr(optional_package, "installed_version", lambda package, version=version: version)
        flash_attn4.unusable.cache_clear()
        assert ("is older" in str(flash_attn4.unusable())) == is_older
