"""The keys that a store knows, and the lists of keys that its calls repeat.

Most calls are those of the step before, so what was found of a list of keys is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import torch

from kvps.dtypes import Spec
from kvps.errors import KeyNotFound
from kvps.phrases import never_initialised
from kvps.store.arguments import Form, as_list, names_of
from kvps.store.rows import are_rows

LISTS_MAX = 256
"""The number of lists of keys that are remembered."""
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


class KnownKeys:
    """The keys of one store."""

    def __init__(self) -> None:
        self.specs: dict[str, Spec] = {}
        self._names: dict[tuple[object, ...], tuple[str, ...]] = {}
        """List of keys, as a user gave it -> their names."""
        self._forms: dict[tuple[str, ...], Form] = {}

    def declare(self, specs: Iterable[tuple[str, Spec]]) -> None:
        """Know these keys, which may have been others before."""
        self.specs.update(specs)
        self._forms.clear()

    def names_of(self, key: object) -> tuple[tuple[str, ...], bool]:
        """Return the names of one key or a list of keys, and whether it was a list."""
        keys = as_list(key)
        if keys is None:
            return names_of(key)
        names = self._names.get(keys)
        if names is None:
            names, _ = names_of(key)
            if len(self._names) >= LISTS_MAX:
                self._names.clear()
            self._names[keys] = names
        return names, True

    def unknown(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return those that are not known."""
        if names in self._forms:
            return ()
        return tuple(name for name in names if name not in self.specs)

    def demand(self, names: tuple[str, ...]) -> None:
        """Check that all are known.

        Raises:
            KeyNotFound: for the first that is not.
        """
        for name in self.unknown(names)[:1]:
            raise KeyNotFound(never_initialised(name))

    def form(self, names: tuple[str, ...]) -> Form | None:
        """Return what the values of these keys must look like; None if one is not known."""
        form = self._forms.get(names)
        if form is None:
            form = Form.of(names, self.specs)
            if form is not None:
                if len(self._forms) >= LISTS_MAX:
                    self._forms.clear()
                self._forms[names] = form
        return form

    def have_rows(self, names: tuple[str, ...], is_many: bool, value: object) -> bool:
        """Whether some of the values of these keys are rows; quick where they are plain tensors."""
        values = value if is_many else [value]
        if not isinstance(values, list | tuple):
            return False
        if TENSORS.issuperset(map(type, values)):
            return torch.sparse_coo in set(map(attrgetter("layout"), values))
        return any(
            are_rows(of_key, self.specs.get(name))
            for name, of_key in zip(names, values, strict=False)
        )
