"""Random training programs as Python source: tensor operations mixed with every other kind of statement.

A program is a module with a function ``make(seed)``, like those of `benchmarks.programs`. Its text comes from
templates, whose holes such as ``<rows>`` are filled with a variable or an expression of that kind. Programs
branch on values of tensors, write in place and through views, change attributes and Python containers, print,
draw random numbers, call NumPy, change settings of torch, raise and catch exceptions. In half of them a NumPy
array made before the first step shares the memory of a weight. Some of them fail by themselves: an exception
is an outcome like any other.
"""

from __future__ import annotations

import linecache
import random
import re
from dataclasses import dataclass, field
from typing import Any

from benchmarks.programs import Make

__all__ = ["random_source", "source_program"]

WIDTH = 4
DEPTH = 2
"""Number of compound statements in one another."""

PREAMBLE = f"""\
import contextlib
import copy
import io
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from benchmarks.programs import State

D = {WIDTH}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.norm, self.words = nn.BatchNorm1d(D), nn.Embedding(D, D)
        self.register_buffer("mean", torch.zeros(D))
        self.calls, self.scale = 0, 1.0

    def forward(self, x):
        self.calls += 1
        return self.b(torch.tanh(self.a(x))) * self.scale


def halves(x):
    for part in x.chunk(2):
        yield part * 0.5


def close(value):
    return min(max(value, -2.0), 2.0) if value == value else 0.0


@contextlib.contextmanager
def setting(change, value, before):
    change(value)
    try:
        yield
    finally:
        change(before)


def advance(schedule, loss):
    if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
        schedule.step(loss.item())
    elif schedule is not None:
        schedule.step()

"""


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


EXPRESSIONS: dict[str, tuple[str, ...]] = {
    "rows": _lines(
        """
        torch.tanh(<rows>)
        torch.sigmoid(<rows>)
        functional.relu(<rows>)
        <rows>.clamp(-1, 1).exp()
        <rows> * <rows>
        <rows> + <cols>
        <rows> * <float>
        <rows> / (<int> + 1)
        <rows> - <scalar>
        <rows> @ <square>
        network.a(<rows>)
        network(<rows>)
        network.norm(<rows>)
        functional.layer_norm(<rows>, (D,))
        <rows>.softmax(-1)
        <rows>.cumsum(0)
        <rows>.flip(0)
        torch.where(<mask>, <rows>, <rows>)
        <rows>[torch.randperm(len(<rows>))]
        <rows>.sort(0).values
        functional.dropout(<rows>, 0.3)
        <rows> + torch.randn_like(<rows>) * 0.1
        network.words(<index>)
        torch.stack([row * 0.5 for row in <rows>])
        torch.cat([<rows>[1:], <rows>[:1]])
        <cols>.expand(len(x), D)
        <rows>.masked_fill(<mask>, 0.5)
        Scaled.apply(<rows>, <float>)
        torch.cat(list(halves(<rows>)))
        torch.from_numpy(np.sort(<rows>.detach().numpy(), axis=0))
        torch.tensor(<rows>.tolist())
        checkpoint(network.a, <rows>, use_reentrant=False)
        (<rows>.double() * 2).float()
        torch.rand(len(x), D, generator=chance)
        <rows>.T.contiguous().T
        torch.zeros(len(x), D)
        <rows>.unbind(1)[0][:, None] + <rows>
        <rows>.detach()
        torch.roll(<rows>, 1, 0)
        torch.func.vmap(torch.sin)(<rows>)
        torch.func.grad(lambda value: (value * <rows>).sum())(<rows>)
        functional.scaled_dot_product_attention(<rows>, <rows>, <rows>)
        torch.fft.fft(<rows>).abs()
        functional.dropout(<rows>, abs(<float>) % 1)
        <rows>.topk(2).indices.float().mean(-1, keepdim=True) + <rows>
        torch.linalg.solve(<square> + torch.eye(D), <rows>.T).T
        (lambda value: value + value)(<rows>)
        next(filter(torch.is_tensor, [None, <rows>]))
        torch.from_numpy(array[:len(x)])
        torch.from_numpy(array)[:len(x)] + <rows>
        torch.as_tensor(array[:len(x)]) * <float>
        torch.as_tensor(array.copy()[:len(x)])
        torch.asarray(<own>.numpy()) - <rows>
        torch.from_numpy(<own>.numpy())
        <rows> @ torch.from_numpy(view).T
        <rows> * 1e-39
        torch.ones(len(x), D) * <rows>
        """
    ),
    "own": _lines(
        """
        <rows>.detach().clone()
        <cols>.detach().repeat(len(x), 1)
        torch.full((len(x), D), <float>)
        """
    ),
    "cols": _lines(
        """
        <rows>.mean(0)
        <rows>.amax(0)
        <rows>[0]
        <rows>.sum(0)
        <cols> * <float>
        <cols> + <cols>
        <square>.diagonal()
        <square>[1]
        <rows>[<int> % len(x)]
        network.a.bias
        <square> @ <cols>
        torch.arange(D) / D
        network.mean
        network.mean.clone()
        torch.bernoulli(torch.full((D,), 0.5))
        torch.quantile(<rows>, <float>, 0)
        torch.einsum('nd,n->d', <rows>, <rows>[:, 0])
        torch.from_numpy(view)[0]
        torch.as_tensor(view[1])
        torch.tensor(view[0])
        torch.as_tensor([<float>] * D)
        torch.from_numpy(array[-1]) * <cols>
        torch.from_dlpack(<cols>.detach())
        functional.embedding_bag(<index>, network.words.weight, torch.tensor([0]))[0]
        """
    ),
    "square": _lines(
        """
        <square>.T
        <square> @ <square> / D
        <rows>.T @ <rows> / D
        torch.outer(<cols>, <cols>)
        network.a.weight
        network.b.weight.T
        torch.eye(D)
        <square>.tril()
        torch.from_numpy(view)
        torch.as_tensor(view) * <square>
        """
    ),
    "scalar": _lines(
        """
        <rows>.mean()
        <rows>.square().mean()
        <cols>.max()
        <rows>[<mask>].sum()
        <square>.trace()
        functional.mse_loss(<rows>, <rows>)
        functional.cross_entropy(<rows>, <index>)
        <rows>.norm()
        torch.dot(<cols>, <cols>)
        <scalar> * <float>
        <scalar> + <scalar>
        <rows>.std()
        torch.tensor(<float>)
        z.sum()
        whole.mean()
        <rows>[<index>, <index>].mean()
        torch.autograd.grad(network.a(<rows>).sum(), network.a.weight)[0].sum()
        torch.linalg.det(<square>)
        torch.logsumexp(<cols>, 0)
        sum(<cols>)
        max(<cols>)
        wide.sum()
        (wide * <float>).square().mean()
        torch.as_tensor(view.sum())
        torch.as_tensor(<float>)
        """
    ),
    "index": _lines(
        """
        <rows>.argmax(-1)
        torch.randint(D, (len(x),))
        <index>.flip(0)
        (<index> + 1) % D
        """
    ),
    "mask": _lines(
        """
        <rows> > 0
        <rows> > <float>
        torch.rand(len(x), D) < 0.5
        ~<mask>
        <mask> & <mask>
        <rows>.isfinite()
        """
    ),
    "float": _lines(
        """
        close(<scalar>.item())
        close(float(<cols>[0]))
        float(np.median(<own>.numpy()))
        network.scale
        close(sum(<cols>.tolist()))
        round(<float>, 2)
        random.random()
        float(np.random.rand())
        optimizer.param_groups[0]['lr']
        0.5
        -0.25
        close(<rows>.detach().numpy().max().item())
        close(float(view[0, 0]))
        close(view.mean().item())
        close(float(array[0, 1]))
        """
    ),
    "int": _lines(
        """
        len(<rows>)
        int(<scalar> > 0)
        <index>.sum().item() % 3
        network.calls % 5
        <rows>.shape[0]
        <mask>.nonzero().shape[0]
        1
        2
        len(kept)
        <mask>.sum().item()
        """
    ),
    "condition": _lines(
        """
        <scalar>.item() > <float>
        <scalar> > 0
        <mask>.any()
        bool(<mask>.all())
        <float> > 0.1
        <int> % 2 == 0
        random.random() < 0.5
        memory['step'] % 3 == 1
        torch.equal(<cols>, <cols>)
        torch.allclose(<rows>, <rows>)
        'row' in memory
        view[0, 0] > 0
        view.sum() > array.sum()
        <rows>.shape == <rows>.shape
        """
    ),
}
"""Expressions of each kind: rows (N, D) f32, own rows without gradient, cols (D,), squares (D, D)."""

STATEMENTS = _lines(
    """
    <own>.add_(<float>)
    <own>.mul_(<cols>)
    <own>.copy_(<rows>.detach())
    <own>[0] = <float>
    <own>[0] = <own>[-1]
    <own>.T.mul_(0.5)
    <own>.view(-1)[0] = 3.0
    <own>[:, 1].fill_(<float>)
    <own>[<mask>] = 0.0
    <own>[1:] += 1
    <own>.clamp_(-1, 1)
    <own>.zero_()
    <own>.uniform_()
    <own>.index_add_(0, torch.tensor([0, 1]), <own>[:2].clone())
    torch.add(<own>, 1, out=<own>)
    <own>.numpy()[0] += 1
    <own>.scatter_(1, <index>[:, None], <float>)
    <own>.index_fill_(0, <index>[:1], 0.5)
    <own>[<index>] = <own>[<index>] * 2
    <own>.requires_grad_().sum().backward()
    <rows>.mul_(2)
    <own>.normal_(generator=chance)
    <own>.masked_fill_(<mask>, 1.0)
    functional.relu_(<own>)
    <own>.unsqueeze(0)[0, 0, 0].add_(1)
    <own>.data.mul_(0.5)
    x[0] = 0.25
    whole.mul_(0.9)
    whole[0] += 1
    z.mul_(0.5)
    z[-1] += <float>
    network.scale *= 0.9
    network.scale = close(<float>) + 1.5
    memory['row'] = <cols>.detach()
    memory['count'] = memory.get('count', 0) + <int>
    state.effects.append(memory.get('count'))
    kept.append(<scalar>.detach())
    del kept[:-2]
    state.effects.append([each.item() for each in kept])
    state.effects.append(<float>)
    state.effects.append(<int>)
    print('scalar', <scalar>)
    print('%.6f' % <scalar>)
    print(<cols>)
    print(<rows>.shape, <rows>.requires_grad)
    print(<rows>.dtype, <rows>.stride(), <rows>.is_contiguous())
    state.effects.append(<cols>.tolist())
    state.effects.append(tuple(<rows>.nonzero().shape))
    state.effects.append(<own>._version)
    state.effects.append(<own>.data_ptr() == <own>.data_ptr())
    state.effects.append(<rows> is <rows>)
    np.random.shuffle(<own>.numpy())
    state.effects.append(str(<scalar>.detach().numpy().dtype))
    optimizer.param_groups[0]['lr'] *= 0.9
    state.effects.append(copy.deepcopy(network.mean).sum().item())
    state.effects.append(repr(next(halves(<cols>))))
    torch.save(network.state_dict(), stream := io.BytesIO())
    state.effects.append(<scalar>.detach().numpy().tolist())
    torch.manual_seed(<int>)
    network.mean.mul_(0.9).add_(<rows>.detach().mean(0), alpha=0.1)
    network.extra = <cols>.detach().clone()
    state.effects.append(getattr(network, 'extra', torch.ones(1)).sum().item())
    network.train(not network.training)
    state.effects.append(view.sum().item())
    state.effects.append(view[0].tolist())
    state.effects.append(memoryview(view).tobytes())
    array[0] += <float>
    np.multiply(array, 0.9, out=array)
    <own>.copy_(torch.from_numpy(array[:len(x)]))
    <own>.mul_(1e-39)
    wide.mul_(<float>)
    torch.set_flush_denormal(bool(<condition>))
    torch.set_num_threads(1 + <int> % 2)
    torch.use_deterministic_algorithms(bool(<condition>))
    torch.set_float32_matmul_precision('medium' if <condition> else 'highest')
    torch.set_default_dtype(torch.float64 if <condition> else torch.float32)
    torch.backends.cuda.enable_flash_sdp(bool(<condition>))
    loss = loss + <scalar> * 0.1
    loss = loss + <rows>.square().mean()
    loss = loss + network(<rows>).square().mean()
    loss = (loss + <rows>.mean()) / 2
    """
)
"""Statements of one line."""

PARAMETER_WRITES = _lines(
    """
    with torch.no_grad(): network.a.weight.mul_(0.99)
    network.b.weight.data.clamp_(-1, 1)
    network.a.bias.detach()[0] = 0.0
    nn.init.normal_(network.words.weight)
    optimizer.zero_grad()
    network.load_state_dict({name: value * 0.9 for name, value in network.state_dict().items()})
    network.a.weight.grad = None
    network.b = copy.deepcopy(network.b)
    view[0] *= 0.99
    np.clip(view, -1, 1, out=view)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]['weight_decay'] = close(<float>) / 99
    """
)
"""Statements that change parameters, which backward would refuse between forward and itself."""

BLOCKS = _lines(
    """
    if <condition>:|else:
    if <condition>:
    for turn in range(<int> % 3):
    for row in <rows>[:2]:
    with torch.no_grad():
    with torch.autocast('cpu', dtype=torch.bfloat16):
    with torch.enable_grad():
    with torch.inference_mode():
    with torch.set_grad_enabled(<condition>):
    with torch.autograd.graph.save_on_cpu():
    with setting(torch.set_flush_denormal, bool(<condition>), False):
    with setting(torch.set_num_threads, 1 + <int> % 2, 1):
    with setting(torch.set_default_dtype, torch.float64, torch.float32):
    with setting(torch.use_deterministic_algorithms, bool(<condition>), False):
    with setting(torch.set_float32_matmul_precision, 'medium', 'highest'):
    with sdpa_kernel(SDPBackend.MATH):
    with torch.backends.mkldnn.flags(enabled=bool(<condition>)):
    with torch.autograd.set_detect_anomaly(bool(<condition>), check_nan=False):
    with torch.autograd.set_multithreading_enabled(bool(<condition>)):
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value.clone(), lambda value: value):
    try:|except (ValueError, RuntimeError, IndexError) as error:
    try:|except Exception as error:
    try:|finally:
    while <condition> and next(turns, 9) < 3:
    if <condition>:|elif <condition>:|else:
    """
)
"""Headers of compound statements, separated by `|`."""

RAISES = _lines(
    """
    raise ValueError('value %.4f' % <scalar>)
    raise RuntimeError('in step', memory['step'])
    torch.ones(3) @ torch.ones(4)
    <rows>[99]
    [][<int>]
    torch.stack([<rows>, <cols>])
    assert <scalar>.item() < 0.1, 'too large'
    <rows>.view(7, 3)
    network.missing
    """
)
"""Statements that raise."""

BACKWARD = _lines(
    """
    loss.backward()
    loss.backward()
    loss.backward()
    loss.backward(retain_graph=True); loss.backward()
    (loss / 2).backward()
    network.a.weight.grad = torch.autograd.grad(loss, network.a.weight)[0]
    loss.backward(); state.effects.append(network.a.weight.grad.norm().item())
    """
)
CLEARING = _lines(
    """
    optimizer.zero_grad()
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    """
)
CLIPPING = _lines(
    """
    norm = nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    nn.utils.clip_grad_value_(network.parameters(), 0.1)
    state.effects.append(float(nn.utils.clip_grad_norm_(network.parameters(), <float> + 2.5)))
    """
)
RETURNS = _lines(
    """
    loss.detach()
    loss.detach()
    loss.detach()
    loss
    <rows>
    <own>
    network.a.weight
    x
    <cols>
    loss.detach() * 2
    """
)
COUNTS = _lines(
    """
    4
    2 + iteration % 3
    random.Random(iteration).randint(2, 6)
    random.Random(iteration).randint(2, 14)
    """
)
OPTIMIZERS = _lines(
    """
    torch.optim.SGD(weights, lr=0.05)
    torch.optim.SGD(weights, lr=0.02, momentum=0.9)
    torch.optim.SGD(weights, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01)
    torch.optim.SGD(weights, lr=0.02, momentum=0.8, dampening=0.1, maximize=True)
    torch.optim.SGD(weights, lr=0.02, momentum=0.9, foreach=True)
    torch.optim.SGD(weights, lr=0.02, momentum=0.9, nesterov=True, fused=True)
    torch.optim.SGD(groups, lr=0.02, momentum=0.9, foreach=False)
    torch.optim.Adam(weights, lr=0.01)
    torch.optim.Adam(weights, lr=0.01, amsgrad=True, weight_decay=0.01)
    torch.optim.Adam(weights, lr=torch.tensor(0.01), foreach=False)
    torch.optim.Adam(weights, lr=0.01, fused=True)
    torch.optim.Adam(groups, lr=0.01, betas=(0.5, 0.9), foreach=True)
    torch.optim.AdamW(weights, lr=0.01)
    torch.optim.AdamW(weights, lr=0.01, foreach=True)
    torch.optim.AdamW(groups, lr=0.01, fused=True)
    torch.optim.AdamW(groups, lr=0.01, amsgrad=True, foreach=False)
    torch.optim.Adagrad(weights, lr=0.02)
    torch.optim.Adagrad(weights, lr=0.02, lr_decay=0.1, fused=True)
    torch.optim.RMSprop(weights, lr=0.01)
    torch.optim.RMSprop(groups, lr=0.01, centered=True, momentum=0.5)
    torch.optim.Adadelta(weights, lr=0.5)
    torch.optim.Adamax(weights, lr=0.01)
    torch.optim.NAdam(weights, lr=0.01)
    torch.optim.RAdam(weights, lr=0.01)
    torch.optim.ASGD(weights, lr=0.01)
    torch.optim.Rprop(weights, lr=0.01)
    """
)
SCHEDULES = _lines(
    """
    None
    None
    lr_scheduler.StepLR(optimizer, 2, 0.5)
    lr_scheduler.CosineAnnealingLR(optimizer, 8)
    lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    lr_scheduler.OneCycleLR(optimizer, 0.05, 64, cycle_momentum='betas' in optimizer.defaults)
    lr_scheduler.ExponentialLR(optimizer, 0.9)
    lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
    lr_scheduler.SequentialLR(optimizer, [lr_scheduler.LinearLR(optimizer)] * 2, [4])
    lr_scheduler.PolynomialLR(optimizer, 20)
    lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    """
)
VIEWS = _lines(
    """
    network.a.weight.detach().numpy()
    network.a.weight.data.numpy()
    np.asarray(network.a.weight.detach())
    network.a.weight.detach().numpy().copy()
    np.ones((D, D), 'float32')
    np.ones((D, D), 'float32')
    """
)
"""NumPy arrays that are made before the first step: half of them share the memory of a weight."""

UPDATES = _lines(
    """
    optimizer.step()
    optimizer.step()
    optimizer.step()
    optimizer.step()
    optimizer.step(lambda: loss)
    if memory['step'] % 3: optimizer.step()
    """
)


_UNTRACEABLE = re.compile(
    r"item\(|float\(|int\(|tolist|numpy|np\.|array|view|print|repr|random\.|chance|seed|save|deepcopy|dlpack"
    r"|\.backward|requires_grad|autograd|torch\.func|checkpoint|Scaled|_version|data_ptr| is |embedding|sdpa"
    r"|mkldnn|torch\.set_|setting|set_grad_enabled|inference|train\(|param_groups|network\.extra|memory\.get|'row'"
    r"|whole|wide|\bz\b|z\[|x\[0\]|kept\[|\] = |\] \+=|<rows>\.mul_|\[<mask>\]|1e-39|round\("
    r"|nonzero|equal|allclose|<scalar> >|\.any\(|all\(\)|sum\(<cols>\)|max\(<cols>\)|try:|while|for "
)
"""What ends or refuses a head wherever it stands before the backward pass."""


@dataclass(slots=True)
class _Writer:
    """A program while it is written.

    Attributes:
        chance: Source of all decisions.
        variables: Names in scope by kind.
        lines: Lines of the step so far.
        named: Number of names given so far.
        chosen: Templates that the program uses: some of all, so that programs differ in kind.
        traceable: Whether it uses only what heads of steps can contain.
    """

    chance: random.Random
    traceable: bool = False
    variables: dict[str, list[str]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    named: int = 0
    chosen: dict[tuple[str, ...], list[str]] = field(default_factory=dict)

    def template(self, templates: tuple[str, ...]) -> str:
        """Return one of the templates that the program uses."""
        if templates not in self.chosen:
            usable = [text for text in templates if not (self.traceable and _UNTRACEABLE.search(text))]
            self.chosen[templates] = self.chance.sample(usable, min(len(usable), max(3, len(usable) // 4)))
        return self.chance.choice(self.chosen[templates])

    def write(self, text: str, depth: int) -> None:
        self.lines.append("    " * (depth + 2) + text)

    def filled(self, template: str, depth: int = 0) -> str:
        """Return a template with each hole filled."""
        return re.sub(r"<(\w+)>", lambda hole: self.value(hole[1], depth), template)

    def value(self, kind: str, depth: int = 0) -> str:
        """Return a variable of a kind, or an expression in parentheses."""
        names = list(self.variables.get(kind, ()))
        if kind == "rows" and self.chance.random() < 0.2:
            names = self.variables["own"]
        if names and (kind == "own" or depth >= 2 or self.chance.random() < 0.75):
            return self.chance.choice(names)
        return f"({self.filled(self.template(EXPRESSIONS[kind]), depth + 1)})"

    def assign(self, depth: int) -> None:
        """Write an assignment to a new name, or to a name in scope."""
        kind = self.chance.choices(
            ("rows", "own", "cols", "square", "scalar", "index", "mask", "float", "int"),
            (8, 3, 3, 2, 4, 1, 2, 2, 1),
        )[0]
        value = self.filled(self.template(EXPRESSIONS[kind]))
        assigned = [name for name in self.variables[kind] if name.isidentifier() and name not in "xyz"]
        if assigned and self.chance.random() < 0.3:
            self.write(f"{self.chance.choice(assigned)} = {value}", depth)
            return
        self.named += 1
        self.write(f"{kind}{self.named} = {value}", depth)
        self.variables[kind].append(f"{kind}{self.named}")

    def block(self, depth: int) -> None:
        """Write a compound statement; names that it introduces end with it."""
        for header in self.filled(self.template(BLOCKS)).split("|"):
            self.write(header, depth)
            outer = {kind: list(names) for kind, names in self.variables.items()}
            if header.startswith("except"):
                self.write("state.effects.append((type(error).__name__, str(error)))", depth + 1)
            if header.startswith("for row in"):
                self.variables["cols"].append("row")
            for _ in range(self.chance.randint(1, 3)):
                self.statement(depth + 1)
            if header == "try:" and self.chance.random() < 0.6:
                when = self.chance.choice(("", "if memory['step'] % 3 == 1: "))
                self.write(when + self.filled(self.chance.choice(RAISES)), depth + 1)
            self.variables = outer

    def statement(self, depth: int) -> None:
        """Write a statement."""
        kinds = {"assign": 5, "line": 5} | ({"block": 2} if depth < DEPTH else {})
        kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
        if kind == "assign":
            self.assign(depth)
        elif kind == "block":
            self.block(depth)
        else:
            self.write(self.filled(self.template(STATEMENTS)), depth)

    def maybe(self, templates: tuple[str, ...], probability: float) -> None:
        if self.chance.random() < probability:
            self.write(self.filled(self.chance.choice(templates)), 0)


def random_source(chance: random.Random, *, traceable: bool = False) -> str:
    """Return the source of a random program.

    Args:
        chance: Source of all decisions; a strategy of Hypothesis can be one.
        traceable: Whether the step up to its update uses only what heads of steps can contain; what changes
            parameters and optimizers afterwards is as in other programs.
    """
    writer = _Writer(chance, traceable)
    _write_step(writer)
    lines = [
        "def make(seed):",
        "    torch.manual_seed(seed)", "    random.seed(seed)", "    np.random.seed(seed)",
        "    network = Network()",
        "    weights = list(network.parameters())",
        "    groups = [{'params': weights[:2]}, {'params': weights[2:], 'lr': 0.03, 'weight_decay': 0.1}]",
        f"    optimizer = {chance.choice(OPTIMIZERS)}",
        f"    schedule = {chance.choice(SCHEDULES)}",
        "    chance = torch.Generator().manual_seed(seed)",
        "    memory, kept, wide = {'step': 0}, [], torch.randn(1 << 16)",
        "    array = np.random.randn(14, D).astype('float32')",
        f"    view = {chance.choice(VIEWS)}",
        f"    whole = {chance.choice(('torch.randn(8, D)',) * 3 + ('torch.from_numpy(array)',))}",
        *([_HOOK] if chance.random() < 0.3 and not traceable else []),
        "",
        "    def batch(iteration):",
        "        own = torch.Generator().manual_seed(seed * 1000 + iteration)",
        f"        count = {chance.choice(COUNTS)}",
        f"        x = {chance.choice(('torch.randn(count, D, generator=own)',) * 2 + ('whole[:count]',))}",
        "        y = torch.randint(D, (count,), generator=own)",
        f"        return x, y, {chance.choice(('x', 'x[1:]', 'x.T', 'torch.ones(count, D)', 'x.clone()'))}",
        "",
        "    state = State(modules={'network': network}, optimizers={'optimizer': optimizer}, batch=batch,",
        "                  tensors={'whole': whole, 'wide': wide, 'array': torch.from_numpy(array)},",
        "                  memory=memory)",
        "",
        "    def step(x, y, z):",
        *writer.lines,
        "",
        "    return step, state",
        "",
    ]  # fmt: skip
    return PREAMBLE + "\n".join(lines)


_HOOK = (
    "    network.a.register_forward_hook(\n"
    "        lambda module, inputs, output: state.effects.append(tuple(output.shape)))"
)


def _write_step(writer: _Writer) -> None:
    chance = writer.chance
    writer.variables = {
        "rows": ["x", "hidden"], "own": ["fresh"], "cols": ["mean"], "square": ["gram"], "scalar": ["total"],
        "index": ["y"], "mask": ["chosen"], "float": ["0.5"], "int": ["len(x)"],
    }  # fmt: skip
    for line in (
        "memory['step'] += 1", "turns = iter(range(9))", "hidden = network(x)", "fresh = x.clone()",
        "mean, gram, total, chosen = hidden.mean(0), x.T @ x / D, hidden.sum(), x > 0",
        "loss = functional.mse_loss(hidden, torch.ones_like(hidden))",
    ):  # fmt: skip
        writer.write(line, 0)
    if writer.traceable:
        writer.write(CLEARING[0], 0)
    else:
        writer.write(chance.choice(("", "if memory['step'] % 2: ")) + chance.choice(CLEARING), 0)
    if chance.random() < 0.08 and not writer.traceable:
        writer.write("hidden.register_hook(lambda gradient: gradient * 0.5)", 0)
    for _ in range(chance.randint(1, chance.choice((3, 10)))):
        writer.statement(0)
    if chance.random() < 0.1 and not writer.traceable:
        writer.write(f"if {writer.value('condition')}:", 0)
        writer.write(writer.filled(chance.choice(RAISES)), 1)
    writer.write(BACKWARD[0] if writer.traceable else chance.choice(BACKWARD), 0)
    writer.maybe(CLIPPING, 0.3)
    writer.write(chance.choice(UPDATES), 0)
    writer.maybe(PARAMETER_WRITES, 0.3)
    for _ in range(chance.randint(0, 2)):
        writer.statement(0)
    writer.write("advance(schedule, loss)", 0)
    writer.write(f"return {writer.filled(chance.choice(RETURNS))}", 0)


def source_program(source: str, name: str) -> Make:
    """Return the function that makes the program of a source, whose lines tracebacks can show.

    Args:
        source: Text of the module.
        name: Name of its file in tracebacks.
    """
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec"), namespace)
    make: Make = namespace["make"]
    return make
