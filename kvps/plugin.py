"""The door for plug-ins: the names that a module of ``kvps-server --plugin MODULE`` imports, and that stay.

A plug-in registers optimizers. The operator of a server names the module, and the workers import
it, too, so that they check the same hyper-parameters::

    from kvps.plugin import Parameter, Schema, Updater, register

    class Damped(Updater):
        def _update(self, weight, gradient, state, terms):
            weight.sub_(gradient, alpha=terms.lr * self.hyper.number("damping"))

    register("damped", Damped, Schema.of("damped", Parameter("damping", 0.5, low=0.0), lr=0.1))
"""

from __future__ import annotations

from kvps.core.optim.schema import Parameter, Schema
from kvps.core.optim.torch_rules import Updater, register

__all__ = ["Updater", "register", "Schema", "Parameter"]
