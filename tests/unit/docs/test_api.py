"""The API reference has every public name, each once."""

import inspect
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


def test_an_attribute_is_described_once() -> None:
    """Sphinx refuses a name that both the text of its class and a property describe."""
    classes = {
        value
        for module in (kvps, kvps.torch)
        for name in module.__all__
        if isinstance(value := getattr(module, name), type)
    }
    assert kvps.torch.DiLoCo in classes
    twice = {
        f"{kind.__qualname__}.{name}"
        for kind in classes
        for name in re.findall(r"^    (\w+): ", _attributes(kind), re.MULTILINE)
        if isinstance(getattr(kind, name, None), property)
    }
    assert not twice


def _attributes(item: type) -> str:
    """Return the section of a class's text that describes its attributes."""
    _, _, rest = inspect.cleandoc(item.__doc__ or "").partition("\nAttributes:\n")
    return rest.partition("\n\n")[0]
