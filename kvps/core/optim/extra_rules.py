"""The update rules that torch.optim lacks: lars, lamb, ftrl, signum, dcasgd, delayed_nesterov,
test and assign."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvps.core.optim.base import MASTER, State, Terms, Updater
from kvps.core.optim.hyperparams import HyperParams
from kvps.tensors import accumulator


def sum_of_squares(values: Tensor) -> Tensor:
    """Return the sum of squares of ``values`` as a float64 scalar, accumulated in float64."""
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()


class Lars(Updater):
    """Layer-wise adaptive rate scaling.

    You, Gitman, Ginsburg: Large Batch Training of Convolutional Networks, 2017,
    arXiv:1708.03888, algorithm 1; ``eps`` as MXNet::

        trust = eta * |w| / (|g| + weight_decay * |w| + eps)     1 if |w| or |g| is 0
        v = momentum * v + lr * trust * (g + weight_decay * w)
        w = w - v

    ``|g|`` is the norm after rescaling and clipping. State: ``velocity`` if momentum.
    """

    needs_norms = True

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._momentum = hyper.number("momentum")
        self._eta = hyper.number("eta")
        self._eps = hyper.number("eps")

    def _new_state(self, weight: Tensor) -> State:
        return {"velocity": torch.zeros_like(weight)} if self._momentum else {}

    def _norms(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> Tensor:
        return torch.stack((sum_of_squares(weight), sum_of_squares(gradient)))

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        rate = _within(terms.lr * self._trust(terms), weight.dtype)
        gradient.add_(weight, alpha=terms.weight_decay)
        if self._momentum:
            velocity = state["velocity"].mul_(self._momentum).add_(gradient, alpha=rate)
            weight.sub_(velocity)
        else:
            weight.sub_(gradient, alpha=rate)

    def _trust(self, terms: Terms) -> float:
        weight_norm, gradient_norm = _roots(terms)
        if weight_norm == 0.0 or gradient_norm == 0.0:
            return 1.0
        below = gradient_norm + terms.weight_decay * weight_norm + self._eps
        return self._eta * weight_norm / below


class Lamb(Updater):
    """Layer-wise adaptive moments.

    You et al.: Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, ICLR
    2020, arXiv:1904.00962, algorithm 2; ``lower_bound`` and ``upper_bound`` are the paper's phi
    as MXNet has it::

        m = beta1 * m + (1 - beta1) * g          v = beta2 * v + (1 - beta2) * g * g
        r = m^ / (sqrt(v^) + eps) + weight_decay * w      m^, v^: bias-corrected
        w = w - lr * clamp(|w|, lower_bound, upper_bound) / |r| * r      1 if either norm is 0

    State: ``exp_avg``, ``exp_avg_sq``.
    """

    needs_norms = True

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._beta1 = hyper.number("beta1")
        self._beta2 = hyper.number("beta2")
        self._eps = hyper.number("eps")
        self._lower = hyper.optional("lower_bound")
        self._upper = hyper.optional("upper_bound")
        self._corrects = hyper.flag("bias_correction")

    def _new_state(self, weight: Tensor) -> State:
        return {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}

    def _norms(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> Tensor:
        mean = state["exp_avg"].lerp(gradient, 1 - self._beta1)
        square = (state["exp_avg_sq"] * self._beta2).addcmul_(gradient, gradient, value=1 - self._beta2)
        direction = self._direction(weight, mean, square, terms)
        return torch.stack((sum_of_squares(weight), sum_of_squares(direction)))

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        mean = state["exp_avg"].lerp_(gradient, 1 - self._beta1)
        square = state["exp_avg_sq"].mul_(self._beta2)
        square.addcmul_(gradient, gradient, value=1 - self._beta2)
        direction = self._direction(weight, mean, square, terms)
        weight.sub_(direction, alpha=_within(terms.lr * self._trust(terms), weight.dtype))

    def _direction(self, weight: Tensor, mean: Tensor, square: Tensor, terms: Terms) -> Tensor:
        first = 1 - self._beta1**terms.step if self._corrects else 1.0
        second = 1 - self._beta2**terms.step if self._corrects else 1.0
        below = (square / second).sqrt_().add_(self._eps)
        return (mean / first).div_(below).add_(weight, alpha=terms.weight_decay)

    def _trust(self, terms: Terms) -> float:
        weight_norm, direction_norm = _roots(terms)
        if self._lower is not None:
            weight_norm = max(weight_norm, self._lower)
        if self._upper is not None:
            weight_norm = min(weight_norm, self._upper)
        if weight_norm == 0.0 or direction_norm == 0.0:
            return 1.0
        return weight_norm / direction_norm


def _within(factor: float, dtype: torch.dtype) -> float:
    """Return a factor that follows from the weights, infinite where ``dtype`` ends: torch refuses others."""
    return math.inf if factor > torch.finfo(dtype).max else factor


def _roots(terms: Terms) -> tuple[float, float]:
    """Return the two norms of a ``needs_norms`` rule."""
    assert terms.norms is not None  # apply() has refused that
    first, second = terms.norms.sqrt().tolist()
    return first, second


class Ftrl(Updater):
    """Follow the regularised leader, per coordinate.

    McMahan et al.: Ad Click Prediction: a View from the Trenches, KDD 2013, algorithm 1 with
    alpha = ``lr``, lambda1 = ``lamda1``, lambda2 = ``weight_decay``::

        z = z + g - (sqrt(n + g * g) - sqrt(n)) / lr * w          n = n + g * g
        w = -sign(z) * max(|z| - lamda1, 0) / ((beta + sqrt(n)) / lr + weight_decay)

    The weight follows from z and n alone: its first value counts for nothing once an element is
    updated, and elements whose z stays small become exactly 0. ``lr`` 0 (by ``lr_mult``) freezes
    a key, state and all. State: ``z``, ``n``.
    """

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._lamda1 = hyper.number("lamda1")
        self._beta = hyper.number("beta")

    def _new_state(self, weight: Tensor) -> State:
        return {"z": torch.zeros_like(weight), "n": torch.zeros_like(weight)}

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        if terms.lr == 0.0:
            return
        z, n = state["z"], state["n"]
        before = n.sqrt()
        n.addcmul_(gradient, gradient)
        root = n.sqrt()
        sigma = (root - before).div_(terms.lr)
        z.add_(gradient).addcmul_(sigma, weight, value=-1)
        shrunk = torch.nn.functional.softshrink(z, self._lamda1)
        below = root.add_(self._beta).div_(terms.lr).add_(terms.weight_decay)
        torch.div(shrunk, below, out=weight).neg_()


class Signum(Updater):
    """The sign of the averaged gradient.

    Bernstein et al.: signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018,
    arXiv:1802.04434, algorithm 2; ``wd_lh`` as MXNet (Loshchilov and Hutter, arXiv:1711.05101)::

        m = momentum * m + (1 - momentum) * (g + weight_decay * w)
        w = (1 - lr * wd_lh) * w - lr * sign(m)

    With ``momentum=0`` it is signSGD, where, as in MXNet, both decays are decoupled::

        w = (1 - lr * (wd_lh + weight_decay)) * w - lr * sign(g)

    State: ``exp_avg`` if momentum.
    """

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._momentum = hyper.number("momentum")
        self._wd_lh = hyper.number("wd_lh")

    def _new_state(self, weight: Tensor) -> State:
        return {"exp_avg": torch.zeros_like(weight)} if self._momentum else {}

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        decay = self._wd_lh
        if self._momentum:
            gradient.add_(weight, alpha=terms.weight_decay)
            sign = state["exp_avg"].lerp_(gradient, 1 - self._momentum).sign()
        else:
            decay += terms.weight_decay
            sign = gradient.sign_()
        if decay:
            weight.mul_(1 - terms.lr * decay)
        weight.sub_(sign, alpha=terms.lr)


class DcAsgd(Updater):
    """Asynchronous SGD that corrects a gradient for the updates applied while it was computed.

    Zheng et al.: Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017,
    arXiv:1609.08326, algorithm 2; momentum as MXNet::

        g~ = g + lamda * g * g * (w - w_bak[rank])     w_bak[rank]: what that rank last read
        v = momentum * v + lr * (g~ + weight_decay * w)
        w = w - v

    A push without a rank (sync), or of a rank that never pulled, is not compensated.
    State: ``velocity`` if momentum, and one ``read.RANK`` per rank that pulled: a copy of the
    weights each, as the paper's. MXNet keeps one copy for all ranks, which compensates nothing
    when ranks alternate; kvps follows the paper.
    """

    tracks_pulls = True

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._momentum = hyper.number("momentum")
        self._lamda = hyper.number("lamda")

    def pulled(self, weight: Tensor, state: State, start: int, stop: int, rank: int) -> None:
        """Remember ``weight[start:stop]`` as what ``rank`` computes its next gradient at.

        The first pull of a rank copies the whole chunk: the parts it has not asked for count as
        read now, the nearest guess there is.
        """
        current = state.get(MASTER, weight)
        read = state.get(f"{_READ}{rank}")
        if read is None:
            state[f"{_READ}{rank}"] = current.clone()
        else:
            read[start:stop].copy_(current[start:stop])

    def _is_lazy(self, name: str) -> bool:
        return name.startswith(_READ)

    def _new_state(self, weight: Tensor) -> State:
        return {"velocity": torch.zeros_like(weight)} if self._momentum else {}

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        read = state.get(f"{_READ}{terms.rank}")  # there is none of rank None
        if read is not None:
            moved = (weight - read).mul_(gradient).mul_(gradient)
            gradient.add_(moved, alpha=self._lamda)
        gradient.add_(weight, alpha=terms.weight_decay)
        if self._momentum:
            velocity = state["velocity"].mul_(self._momentum).add_(gradient, alpha=terms.lr)
            weight.sub_(velocity)
        else:
            weight.sub_(gradient, alpha=terms.lr)


class DelayedNesterov(Updater):
    """Nesterov momentum that moves once in ``period`` pushes, for workers that push at different times.

    Liu et al.: Asynchronous Local-SGD Training for Language Modeling, 2024, arXiv:2401.09135, algorithm 3
    with c = 0::

        g = g + weight_decay * w       b = b + g       w = w - lr * g
        and at every period-th push    m = momentum * m + b       w = w - lr * momentum * m       b = 0

    Each push counts at once, as a step of plain SGD; only the momentum waits for its sum with
    others. With ``period`` 1 it is SGD with Nesterov momentum. For N workers the paper has
    ``period`` N, and ``rescale_grad`` 1/N.
    State: ``momentum_buffer``, ``pending``.
    """

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._momentum = hyper.number("momentum")
        self._period = int(hyper.number("period"))

    def _new_state(self, weight: Tensor) -> State:
        return {name: torch.zeros_like(weight) for name in ("momentum_buffer", "pending")}

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        gradient.add_(weight, alpha=terms.weight_decay)
        pending = state["pending"].add_(gradient)
        weight.sub_(gradient, alpha=terms.lr)
        if terms.step % self._period == 0:
            buffer = state["momentum_buffer"].mul_(self._momentum).add_(pending)
            weight.sub_(buffer, alpha=terms.lr * self._momentum)
            pending.zero_()


_READ = "read."
"""Prefix of the state entries that hold what one rank last read."""


class RowWiseAdagrad(Updater):
    """Adagrad with one accumulator for each row of an embedding table.

    TorchRec's RowWiseAdagrad, and EXACT_ROWWISE_ADAGRAD of fbgemm::

        g = g + weight_decay * w
        s = s + mean(g * g)                               over the elements of the row
        w = w - lr / (1 + (step - 1) * lr_decay) * g / (sqrt(s) + eps)

    State: ``sum`` [n, 1], float32 also where the weights are half. The step is that of the table.
    """

    is_by_row = True

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._lr_decay = hyper.number("lr_decay")
        self._initial = hyper.number("initial_accumulator_value")
        self._eps = hyper.number("eps")

    def _new_state(self, weight: Tensor) -> State:
        shape = (*weight.shape[:-1], 1)
        return {"sum": accumulator(weight[..., :0]).new_full(shape, self._initial)}

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        if terms.weight_decay:
            gradient.add_(weight, alpha=terms.weight_decay)
        wide = accumulator(gradient)
        total = state["sum"].add_(wide.square().mean(-1, keepdim=True))
        rate = terms.lr / (1.0 + (terms.step - 1) * self._lr_decay)
        weight.addcdiv_(wide, total.sqrt().add_(self._eps), value=-rate)


class Test(Updater):
    """``w = w + rescale_grad * g``: what MXNet's own tests use to count pushes.

    Of the common hyper-parameters only ``rescale_grad``, ``clip_gradient`` and
    ``multi_precision`` matter. Integer weights are allowed; the first two are then whole numbers,
    and sums wrap around as integers do.
    """

    takes_integers = True
    __test__ = False  # the name is MXNet's; pytest must not collect it

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        weight.add_(gradient)


class Assign(Updater):
    """``w = g``: the last push is the value, bit for bit.

    It makes of a key without rounds a place where one rank tells the others something. Of the common
    hyper-parameters only ``rescale_grad`` and ``clip_gradient`` matter. Integer weights are allowed.
    """

    takes_integers = True

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        weight.copy_(gradient)


RULES: dict[str, type[Updater]] = {
    **{"lars": Lars, "lamb": Lamb, "ftrl": Ftrl, "signum": Signum, "dcasgd": DcAsgd},
    **{"delayed_nesterov": DelayedNesterov, "rowwise_adagrad": RowWiseAdagrad},
    **{"test": Test, "assign": Assign},
}
"""Optimizer name -> class, of the rules in this file."""
