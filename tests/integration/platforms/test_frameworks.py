"""Lightning, Accelerate and the Trainer of transformers over a cluster: the weights are those of gloo."""

import importlib.util
import re
import sys

import pytest

from tests.integration.processes import ROOT, Process, Processes

LIMIT_S = 180.0
LIGHTNING = """
import sys
import lightning, torch
from lightning.pytorch.strategies import DDPStrategy
import kvps.torch
from kvps.platforms.lightning import KvpsStrategy

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def training_step(self, batch, number):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, number):
        self.log("val", (self.net(batch[0]) - batch[1]).abs().mean(), sync_dist=True)

    def configure_optimizers(self):
        sgd = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": sgd, "lr_scheduler": torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)}

strategies = {
    "gloo": lambda: DDPStrategy(process_group_backend="gloo"),
    "ddp": lambda: DDPStrategy(process_group_backend="kvps"),
    "kvps": lambda: "kvps",
    "mean": lambda: KvpsStrategy(update_on_kvstore=False),
}
lightning.seed_everything(0, verbose=False)
x = torch.randn(56, 4, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x[:, :2])
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=strategies[sys.argv[1]](), max_epochs=2,
    accumulate_grad_batches=int(sys.argv[2]), logger=False, default_root_dir="out-" + sys.argv[1],
    enable_progress_bar=False, enable_model_summary=False,
)
module = Module()
loader = torch.utils.data.DataLoader(data, 8)
trainer.fit(module, loader, loader)
state = torch.cat([value.flatten() for value in module.state_dict().values()])
print("weights", " ".join(f"{value:.5f}" for value in state), float(trainer.callback_metrics["val"]))
"""
ACCELERATE = """
import sys
import torch, torch.distributed as dist
from accelerate import Accelerator
import kvps.torch
from kvps.platforms.accelerate import without_ddp

mode = sys.argv[1]
if mode != "gloo":
    dist.init_process_group("kvps")
accelerator = Accelerator(cpu=True)
assert (dist.get_backend(), accelerator.num_processes) == ("gloo" if mode == "gloo" else "kvps", 2)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if mode in ("servers", "mean"):
    assert without_ddp(accelerator) is accelerator
    on_servers = mode == "servers"
    optimizer = kvps.torch.DistributedOptimizer(optimizer, model, update_on_kvstore=on_servers)
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :2]), 8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
assert (type(model) is torch.nn.Sequential) == (mode in ("servers", "mean"))
for _ in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        accelerator.backward(loss)
        optimizer.step()
state = torch.cat([value.flatten() for value in accelerator.unwrap_model(model).state_dict().values()])
gathered = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
print("weights", " ".join(f"{value:.5f}" for value in state), gathered, flush=True)
if mode in ("servers", "mean"):
    try:
        without_ddp(accelerator)
    except kvps.ConfigError as error:
        assert "call without_ddp() before prepare()" in str(error)
    else:
        raise AssertionError("a model was prepared before")
accelerator.end_training()
"""
TRANSFORMERS = """
import sys
import torch, torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
import kvps.torch
from kvps.platforms.accelerate import without_ddp

mode, passes = sys.argv[1], int(sys.argv[2])
if mode != "gloo":
    dist.init_process_group("kvps")
torch.manual_seed(0)
shape = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, **shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
)
generator = torch.Generator().manual_seed(1)
rows = [torch.randint(64, (16,), generator=generator) for _ in range(64)]
clip = 0.0 if mode == "servers" else 0.5 if mode == "clipped" else 0.0
args = TrainingArguments(
    "out", use_cpu=True, per_device_train_batch_size=4, num_train_epochs=1, report_to=[],
    save_strategy="no", disable_tqdm=True, max_grad_norm=clip, gradient_accumulation_steps=passes,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if mode in ("servers", "mean"):
    optimizer = kvps.torch.DistributedOptimizer(
        optimizer, model, update_on_kvstore=mode == "servers", backward_passes_per_step=passes
    )
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = Trainer(model, args, train_dataset=data, optimizers=(optimizer, schedule))
if mode in ("servers", "mean"):
    without_ddp(trainer.accelerator)
trainer.train()
assert args.world_size == 2
state = torch.cat([value.flatten() for value in model.state_dict().values()])
print("weights", f"{state.double().sum():.4f} {state.double().norm():.4f}", flush=True)
"""
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]


def needs(*packages: str) -> None:
    """Skip where a package is not installed; it is imported in other processes only."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: see CONTRIBUTING.md")


def launch(processes: Processes, *command: object) -> Process:
    words = ("launch", "-n", 2, "-s", 2, "--", sys.executable, *command)
    return processes.kvps(*words, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


def weights(processes: Processes, script: str, *arguments: object) -> str:
    """Return what both workers print of their weights, which must be the same."""
    launched = launch(processes, processes.script(script), *arguments)
    assert launched.wait(LIMIT_S) == 0, launched
    found = re.findall(r"\[worker \d\] weights (.*)", launched.out)
    assert len(found) == 2, launched
    assert len(set(found)) == 1, launched
    return str(found[0])


def close(left: str, right: str) -> bool:
    pairs = zip(left.split(), right.split(), strict=True)
    numbers = [(float(item.strip("[],")), float(two.strip("[],"))) for item, two in pairs]
    return all(abs(item - two) <= 2e-4 * max(1.0, abs(item)) for item, two in numbers)


@pytest.mark.parametrize("passes", [1, 3])
def test_lightning(processes: Processes, passes: int) -> None:
    """Batches do not divide by the passes that are accumulated: the last step of an epoch has fewer."""
    needs("lightning")
    wanted = weights(processes, LIGHTNING, "gloo", passes)
    for strategy in ("ddp", "kvps", "mean"):
        assert close(weights(processes, LIGHTNING, strategy, passes), wanted), strategy


REFUSED = """
import lightning, torch
from kvps.errors import ConfigError
from kvps.platforms.lightning import KvpsStrategy

try:
    KvpsStrategy(find_unused_parameters=True)
except ConfigError as error:
    assert "find_unused_parameters" in str(error), error
else:
    raise AssertionError
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch, number):
        return self.net(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, strategy=KvpsStrategy(), max_epochs=1, gradient_clip_val=1.0, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), 2)
try:
    trainer.fit(Module(), loader)
except ConfigError as error:
    assert "gradient_clip_val=1.0" in str(error), error
    print("refused", flush=True)
"""


def test_lightning_says_what_cannot_be(processes: Processes) -> None:
    needs("lightning")
    process = processes.python(processes.script(REFUSED))
    assert process.wait(LIMIT_S) == 0, process
    assert "refused" in process.out


def test_accelerate(processes: Processes) -> None:
    needs("accelerate")
    wanted = weights(processes, ACCELERATE, "gloo")
    for mode in ("ddp", "servers", "mean"):
        assert close(weights(processes, ACCELERATE, mode), wanted), mode


@pytest.mark.parametrize("passes", [1, 2])
def test_transformers(processes: Processes, passes: int) -> None:
    needs("transformers", "accelerate")
    wanted = weights(processes, TRANSFORMERS, "gloo", passes)
    for mode in ("ddp", "servers", "mean"):
        assert close(weights(processes, TRANSFORMERS, mode, passes), wanted), mode


EXAMPLES = [
    ("lightning", "lightning_digits.py", ("--epochs", "3", "--min-accuracy", "0.8"), "accuracy 0."),
    ("lightning", "lightning_digits.py", ("--strategy", "ddp", "--epochs", "3", "--min-accuracy", "0.8"), "accuracy 0."),
    ("accelerate", "accelerate_digits.py", ("--epochs", "4", "--min-accuracy", "0.8"), "accuracy 0."),
    ("accelerate", "accelerate_digits.py", ("--servers", "--epochs", "4", "--min-accuracy", "0.8"), "accuracy 0."),
    ("transformers", "transformers_gpt.py", ("--steps", "40", "--max-loss", "4"), "after 40 steps"),
    ("transformers", "transformers_gpt.py", ("--ddp", "--steps", "40", "--max-loss", "4"), "after 40 steps"),
]  # fmt: skip


@pytest.mark.parametrize(("package", "script", "flags", "says"), EXAMPLES)
def test_an_example(
    processes: Processes, package: str, script: str, flags: tuple[str, ...], says: str
) -> None:
    needs(package, "sklearn")
    launched = launch(processes, ROOT / "examples" / script, *flags)
    assert launched.wait(LIMIT_S) == 0, launched
    assert says in launched.out, launched
