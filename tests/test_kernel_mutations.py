"""The mistakes of `make mutations-native` still match the kernels' sources; that command builds and tests each."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[1] / "kernels" / "tests" / "mutations.py"


def load_mutations() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_mutations", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FILE.parent)  # as for a script
        spec.loader.exec_module(module)
    return module


def test_every_mistake_matches_one_place(tmp_path: Path) -> None:
    module = load_mutations()
    names = [mutation.name for mutation in module.MUTATIONS]
    assert len(names) == len(set(names)) > 30
    for mutation in module.MUTATIONS:
        place = tmp_path / "src" / mutation.file
        place.parent.mkdir(exist_ok=True)
        source = (module.KERNELS / "src" / mutation.file).read_text(encoding="utf-8")
        place.write_text(source, encoding="utf-8")
        with mutation.applied(tmp_path):
            assert place.read_text(encoding="utf-8") == source.replace(mutation.before, mutation.after) != source
        assert place.read_text(encoding="utf-8") == source


def test_a_mistake_that_matches_no_place_is_an_error(tmp_path: Path) -> None:
    module = load_mutations()
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "product.h").write_text("some other source", encoding="utf-8")
    mutation = next(mutation for mutation in module.MUTATIONS if mutation.file == "product.h")
    with pytest.raises(ValueError, match="occurs 0 times"), mutation.applied(tmp_path):
        pass


def test_copying_replaces_only_files_that_differ(tmp_path: Path) -> None:
    """Builds compare modification times, so a restored file must be newer than the objects built from the mistake."""
    module = load_mutations()
    module.copy_sources(tmp_path)
    same, left = (tmp_path / "src" / name for name in ("team.h", "product.h"))
    left.write_text("a mistake", encoding="utf-8")
    for file in (same, left):
        os.utime(file, (1, 1))
    module.copy_sources(tmp_path)
    assert left.read_bytes() == (module.KERNELS / "src" / "product.h").read_bytes()
    assert (same.stat().st_mtime, left.stat().st_mtime > 1) == (1, True)
