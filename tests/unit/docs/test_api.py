"""The API reference has every public name, each once."""

from __future__ import annotations

import re
from pathlib import Path

import kvps
import kvps.torch

API = Path(__file__).resolve().parents[3] / "docs" / "api"


def test_every_public_name_is_in_the_reference() -> None:
    public = {f"kvps.{name}" for name in kvps.__all__ if name != "__version__"}
    public |= {f"kvps.torch.{name}" for name in kvps.torch.__all__}
    named = [
        name
        for page in sorted(API.glob("*.md"))
        for name in re.findall(r"^\.\. auto\w+:: (\S+)$", page.read_text("utf-8"), re.MULTILINE)
    ]
    assert public <= set(named)
    assert len(named) == len(set(named))
