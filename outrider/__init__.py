"""Installed, `outrider` holds every sub-package. In a checkout they are the repository's
top-level folders, so the root is added to the places where `import outrider.drafter` looks."""

from pathlib import Path

_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))
