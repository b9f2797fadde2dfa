"""Names of MXNet that are not here, and what takes their place."""

from __future__ import annotations

from collections.abc import Mapping

ELSEWHERE = {
    "AttrScope": "use torch.nn modules",
    "Context": "use torch.device, or mx.cpu() and mx.gpu(i)",
    "autograd": "use loss.backward() of torch; torch adds to .grad, so set it to zero first",
    "callback": "log in your loop; kv.store.metrics() has the numbers of a store",
    "contrib": "use the libraries of torch",
    "executor": "use torch.nn modules",
    "image": "use torchvision",
    "init": "use torch.nn.init",
    "initializer": "use torch.nn.init",
    "io": "use torch.utils.data.DataLoader, with kvps.data_sampler(data, kv.store)",
    "lr_scheduler": "call optimizer.set_learning_rate(lr) on every worker; it reaches the servers",
    "metric": "use torch, and kvps.torch.average for means over workers",
    "mod": "write the loop with kvps.Trainer",
    "model": "use torch.save and torch.load, or kv.store.checkpoint()",
    "module": "write the loop with kvps.Trainer",
    "mon": "use hooks of torch.nn.Module",
    "monitor": "use hooks of torch.nn.Module",
    "np": "use torch or numpy",
    "npx": "use torch or numpy",
    "operator": "use torch.autograd.Function",
    "profiler": "use torch.profiler, and 'kvps trace' for servers",
    "random": "use torch.manual_seed and torch.rand",
    "recordio": "use torch.utils.data",
    "rnn": "use torch.nn.LSTM or torch.nn.GRU",
    "sym": "use torch.nn modules",
    "symbol": "use torch.nn modules",
    "test_utils": "use torch.testing",
    "util": "use torch",
    "viz": "use torch.utils.tensorboard",
}
"""Name in the package ``mxnet`` -> the way out."""


def missing(place: str, name: str, ways_out: Mapping[str, str]) -> AttributeError:
    """Return the error for a name that is not there, with the way out where one is known.

    Args:
        place: what the script named it in, such as ``mx.nd``.
        name: the name.
        ways_out: name -> the way out.
    """
    way_out = ways_out.get(name, "docs/migrating/mxnet-names.md lists what is there")
    return AttributeError(f"{place}.{name} of MXNet is not in kvps.compat.mx: {way_out}")
