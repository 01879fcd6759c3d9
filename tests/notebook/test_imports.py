"""``import icmllab`` is light, and each notebook tool loads only what it works with."""

import json
import subprocess
import sys
import time

import pytest

import icmllab

HEAVY = ("torch", "triton", "pandas", "matplotlib", "ipywidgets", "sklearn", "scipy", "numpy")


def loaded_after(code: str) -> set[str]:
    """The heavy packages in ``sys.modules`` of a fresh interpreter that ran ``code``."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(out.stdout.splitlines()[-1])) & set(HEAVY)


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_after("import icmllab") == set()
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import icmllab"], check=True)
    with_icmllab = time.perf_counter() - begin
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    print(f"import icmllab: {with_icmllab - (time.perf_counter() - begin):.3f} s")


@pytest.mark.parametrize("name", [n for n in icmllab.__all__ if n != "__version__"])
def test_reaching_for_a_tool_loads_nothing_heavy_before_it_is_called(name):
    assert loaded_after(f"from icmllab import {name}") == set()


def test_a_claims_table_needs_no_array_library():
    code = (
        "from icmllab import Claims; c = Claims('a/b'); c.check('x', measured=1, above=0); "
        "c._repr_mimebundle_()"
    )
    assert loaded_after(code) == set()


def test_every_exported_name_is_there_and_others_are_not():
    assert all(callable(getattr(icmllab, n)) for n in icmllab.__all__ if n != "__version__")
    assert set(icmllab.__all__) <= set(dir(icmllab))
    with pytest.raises(AttributeError, match="no attribute 'Claim'"):
        icmllab.Claim  # noqa: B018
