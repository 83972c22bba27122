"""Kernels that PyTorch launches for each operation of a network: forward and, in training, for the gradient.

A tape receives operations as a model's code calls them, with their shapes, and records the kernels of eager
PyTorch (version 2.1, CUDA), one workload each; if the run trains, also the kernels that autograd launches.
Kernels without a matching operator are elementwise copies of as many bytes (`moved`): look-ups, sums over
rows, dropout with its mask of one byte per element.

Source: PyTorch 2.1, `aten/src/ATen/native` and `tools/autograd/derivatives.yaml`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tunebench.dtype import itemsize
from tunebench.optimizer import find_optimizer
from tunebench.workload import Workload
from tunebench.workloads.common.norm import EPS, Norm
from tunebench.workloads.networks.network_run import NetworkRun, Operation, Phase
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.cross_entropy import CrossEntropy
from tunebench.workloads.operators.elementwise import Elementwise
from tunebench.workloads.operators.gemm import Gemm
from tunebench.workloads.operators.grouped_gemm import GroupedGemm
from tunebench.workloads.operators.layernorm import LayerNorm
from tunebench.workloads.operators.rmsnorm import RmsNorm
from tunebench.workloads.operators.softmax import Softmax

__all__ = ["ProductType", "Prologue", "Tape", "Weight"]

Weight = Literal["in,out", "out,in"]
"""Storage order of a linear layer's matrix: (in, out) in GPT-2's `Conv1D`, (out, in) in `torch.nn.Linear`."""

Prologue = Literal["none", "scale", "mask"]

ProductType = Literal["f32", "f16", "bf16", "e4m3"]
"""Dtype of the operands of a product."""

MADE = 2**16
"""Most workloads to keep: layers in many runs have many kernels in common."""

SCALE_KERNELS = 2
"""Small kernels of a conversion to 8-bit floats with current scaling: the reset of the maximum, the scale."""

ROW = 1024
"""Row length, in elements, of copies known only by their bytes."""


@functools.lru_cache(maxsize=MADE)
def _made(operator: type[Workload], **dimensions: Any) -> Workload:
    return operator(**dimensions)


@functools.lru_cache(maxsize=MADE)
def _changed(work: Workload, **dimensions: Any) -> Workload:
    return work.changed(**dimensions)


@dataclass(slots=True)
class Tape:
    """Operations of a run, in the order they were added.

    Attributes:
        run: The run that the operations belong to.
        operations: Operations added so far.
    """

    run: NetworkRun
    operations: list[Operation] = field(default_factory=list)

    def add(self, part: str, work: Workload, phase: Phase = "forward", *, alone: bool = False) -> None:
        """Add a kernel; kernels of the gradient are added only if the run trains."""
        if phase == "forward" or self.run.trains:
            self.operations.append(Operation(workload=work, part=part, phase=phase, alone=alone))

    def extend(self, operations: Iterable[Operation], times: int = 1) -> None:
        """Add operations, each repeated a number of times."""
        if times == 1:
            self.operations += operations
        elif times:
            self.operations += [replace(operation, count=operation.count * times) for operation in operations]

    # -- elementwise ----------------------------------------------------------------------------

    def pointwise(
        self, part: str, shape: tuple[int, int], expression: str, backward: tuple[str, ...] = ()
    ) -> None:
        """Add one elementwise kernel, and those of its gradient; each name is a tensor of that shape.

        Only the name `row` is a vector: it is the same for all rows, or small enough to stay in a cache.

        Args:
            part: Part of the network.
            shape: Rows and columns.
            expression: Forward expression.
            backward: Expressions of the gradient's kernels.
        """
        self.elementwise(part, shape, expression)
        for gradient in backward:
            self.elementwise(part, shape, gradient, "backward")

    def elementwise(
        self,
        part: str,
        shape: tuple[int, int],
        expression: str,
        phase: Phase = "forward",
        *,
        alone: bool = False,
    ) -> None:
        """Add one elementwise kernel."""
        rows, cols = shape
        vectors = "row" if "row" in expression else ""
        work = _made(
            Elementwise, rows=rows, cols=cols, dtype=self.run.dtype, expression=expression, vectors=vectors
        )
        self.add(part, work, phase, alone=alone)

    def copy(self, part: str, shape: tuple[int, int], phase: Phase = "forward") -> None:
        """Add a copy, which in most cases permutes axes."""
        self.elementwise(part, shape, "x", phase)

    def cast(self, part: str, shape: tuple[int, int], *, up: bool, phase: Phase = "forward") -> None:
        """Add a conversion between half precision and f32; nothing if the run is in f32."""
        dtype = self.run.dtype
        if dtype == "f32":
            return
        rows, cols = shape
        work = Elementwise(
            rows=rows,
            cols=cols,
            dtype=dtype if up else "f32",
            expression="x",
            out="f32" if up else dtype,
        )
        self.add(part, work, phase)

    def moved(self, part: str, nbytes: int, phase: Phase = "forward") -> None:
        """Add a kernel known only by the bytes it reads and writes: a copy of half as many bytes."""
        rows = max(1, round(nbytes / (2 * ROW * itemsize(self.run.dtype))))
        self.elementwise(part, (rows, ROW), "x", phase)

    def residual(self, part: str, shape: tuple[int, int]) -> None:
        """Add a residual sum; backward adds the gradients of its two branches."""
        self.pointwise(part, shape, "x+y", ("x+y",))

    def dropout(self, part: str, shape: tuple[int, int], probability: float) -> None:
        """Add dropout: nothing in inference, and no separate kernel if a compiler fuses it."""
        if not self.run.trains or not probability or self.run.compiled:
            return
        nbytes = shape[0] * shape[1] * (2 * itemsize(self.run.dtype) + 1)  # one byte of mask per element
        self.moved(part, nbytes)
        self.moved(part, nbytes, "backward")

    def activation(self, part: str, shape: tuple[int, int], name: str) -> None:
        """Add an activation: one kernel, except unfused `gelu_new` of GPT-2, which is a formula."""
        if name == "gelu_new" and not self.run.compiled:
            for step in ("x*0.5", "x*square(x)", "x*0.044715", "x+y", "x*0.797885", "tanh(x)", "x+1", "x*y"):
                self.elementwise(part, shape, step)
            # Gradients of the product, the halving, tanh, two factors and the power (three kernels), and sums
            # over the three branches.
            steps = ("dy*x", "dy*x", "x*0.5", "dy*(1-y*y)", "x*0.797885", "x*0.044715")
            for step in (*steps, "square(x)", "x*3", "dy*x", "x+y", "x+y"):
                self.elementwise(part, shape, step, "backward")
            return
        expression = {"gelu_new": "gelu(x)"}.get(name, f"{name}(x)")
        self.pointwise(part, shape, expression, (f"dy*{expression}",))

    # -- reductions -----------------------------------------------------------------------------

    def layernorm(self, part: str, shape: tuple[int, int], residual: bool = False, eps: float = EPS) -> None:
        """Add a layer normalisation; `residual` fuses a residual sum ahead of it."""
        self._normalised(LayerNorm, part, shape, residual, eps)

    def _normalised(
        self, operator: type[Norm], part: str, shape: tuple[int, int], residual: bool, eps: float
    ) -> None:
        """Add a normalisation in one kernel, and its gradient."""
        sizes = {"rows": shape[0], "cols": shape[1], "dtype": self.run.dtype}
        prologue, stats = "residual" if residual else "none", self.run.trains
        self.add(part, _made(operator, **sizes, prologue=prologue, stats=stats, eps=eps))
        self.add(part, _made(operator, **sizes, direction="backward"), "backward")

    def fused_rmsnorm(
        self, part: str, shape: tuple[int, int], residual: bool = False, eps: float = EPS
    ) -> None:
        """Add an RMS normalisation in one kernel; `residual` fuses a residual sum ahead of it."""
        self._normalised(RmsNorm, part, shape, residual, eps)

    def rmsnorm(self, part: str, shape: tuple[int, int], residual: bool = False, eps: float = EPS) -> None:
        """Add an RMS normalisation: one kernel if fused, else the chain of the model code."""
        rows, cols = shape
        if self.run.compiled:
            self.fused_rmsnorm(part, shape, residual, eps)
            return
        wide = Tape(replace(self.run, dtype="f32"))  # the model code computes in f32
        wide.elementwise(part, shape, "square(x)")
        wide.summed(part, rows * cols)
        wide.elementwise(part, shape, "x*row")
        # Backward: gradients of the factor (a product, and a sum over the row) and of the square.
        for step in ("dy*row", "dy*x", "x", "x*2", "dy*x", "x+y"):
            wide.elementwise(part, shape, step, "backward")
        wide.summed(part, 2 * rows * cols, "backward")  # one of them is the expanded gradient of the mean
        self.cast(part, shape, up=True)
        self.extend(wide.operations)
        self.cast(part, shape, up=False)
        self.elementwise(part, shape, "x*row")
        for step in ("dy*row", "dy*x"):  # gradient of the weight
            self.elementwise(part, shape, step, "backward")
        self.summed(part, rows * cols, "backward")
        for up in (True, False):
            self.cast(part, shape, up=up, phase="backward")

    def summed(self, part: str, elements: int, phase: Phase = "forward") -> None:
        """Add a sum over one axis: it reads all elements and writes few."""
        self.moved(part, elements * itemsize(self.run.dtype), phase)

    def softmax(self, part: str, shape: tuple[int, int], prologue: Prologue = "none") -> None:
        """Add a softmax of rows, with a scale or a mask in the same kernel."""
        rows, cols = shape
        work = _made(Softmax, rows=rows, cols=cols, dtype=self.run.dtype, prologue=prologue)
        self.add(part, work)
        back: Prologue = "none" if prologue == "mask" else prologue  # adding passes gradients on
        self.add(part, _changed(work, prologue=back, direction="backward"), "backward")

    def loss(self, part: str, tokens: int, vocabulary: int) -> None:
        """Add cross entropy: log-softmax and the choice of classes, or one kernel if fused."""
        if not self.run.trains:
            return
        if self.run.kernels == "megatron":
            self._loss_in_parts(part, tokens, vocabulary)
            return
        if self.run.compiled:
            work = _made(CrossEntropy, rows=tokens, cols=vocabulary, dtype=self.run.dtype)
            self.add(part, work)
            self.add(part, _changed(work, direction="backward"), "backward")
            return
        shape = (tokens, vocabulary)
        self.cast(part, shape, up=True)  # model code computes the loss of 16-bit logits in f32
        log_softmax = _made(Softmax, rows=tokens, cols=vocabulary, dtype="f32", log=True)
        self.add(part, log_softmax)
        zeros = Tape(replace(self.run, dtype="f32"))
        zeros.moved(part, tokens * vocabulary * itemsize("f32"), "backward")  # mostly zeros
        self.extend(zeros.operations)
        self.add(part, _changed(log_softmax, direction="backward"), "backward")
        self.cast(part, shape, up=False, phase="backward")

    def _loss_in_parts(self, part: str, tokens: int, vocabulary: int) -> None:
        """Add Megatron-LM's cross entropy over a divided vocabulary, in f32, one kernel per step.

        Source: NVIDIA/Megatron-LM, `megatron/core/tensor_parallel/cross_entropy.py`.
        """
        wide = Tape(replace(self.run, dtype="f32"))
        shape = (tokens, vocabulary)
        wide.summed(part, tokens * vocabulary)  # largest logit
        for step in ("x-row", "exp(x)"):
            wide.elementwise(part, shape, step)
        wide.summed(part, tokens * vocabulary)
        wide.elementwise(part, shape, "x/row")
        wide.elementwise(part, shape, "x*row", "backward")
        self.cast(part, shape, up=True)
        self.extend(wide.operations)
        self.cast(part, shape, up=False, phase="backward")

    # -- products -------------------------------------------------------------------------------

    def linear(
        self,
        part: str,
        m: int,
        n: int,
        k: int,
        *,
        bias: bool = True,
        weight: Weight = "out,in",
        dtype: ProductType | None = None,
    ) -> None:
        """Add a linear layer, and the gradients of its input, matrix and bias.

        Args:
            part: Part of the network.
            m: Number of tokens.
            n: Width of the output.
            k: Width of the input.
            bias: Whether the layer adds a bias.
            weight: Storage order of the matrix.
            dtype: Dtype of the products; None for that of the run.
        """
        by_rows = weight == "in,out"
        dtype = dtype or self.run.dtype
        epilogue: Literal["bias", "none"] = "bias" if bias else "none"
        self.add(
            part, _made(Gemm, m=m, n=n, k=k, dtype=dtype, trans="nn" if by_rows else "nt", epilogue=epilogue)
        )
        self.add(part, _made(Gemm, m=m, n=k, k=n, dtype=dtype, trans="nt" if by_rows else "nn"), "backward")
        rows, cols = (k, n) if by_rows else (n, k)
        self.add(part, _made(Gemm, m=rows, n=cols, k=m, dtype=dtype, trans="tn"), "backward")
        if bias:
            self.summed(part, m * n, "backward")

    def inner_linear(
        self,
        part: str,
        m: int,
        n: int,
        k: int,
        *,
        bias: bool = True,
        weight: Weight = "out,in",
        groups: int = 1,
    ) -> None:
        """Add a linear layer inside a layer, or those of experts, in 8-bit floats if the run has them.

        See `linear`; several groups are experts (see `grouped_linear` and `looped_linear`).

        The measured products of 8-bit floats include the conversion of their left operand from 16 bits. That
        is the conversion of the input in the forward pass, and of the output's gradient in that of the input.
        In the gradient of the weights, whose operands are converted already, it is in place of their
        transposition, which tensor cores of sm_89 and sm_90 need, for about as many bytes. With current
        scaling, a kernel before each conversion reads the tensor for its maximum.
        """
        if groups > 1:
            add = self.grouped_linear if self.run.fp8 == "none" else self.looped_linear
            add(part, groups, m, n, k)
            return
        dtype: ProductType = self.run.dtype if self.run.fp8 == "none" else "e4m3"
        if self.run.fp8 == "current":
            self.summed(part, m * k)
            self.summed(part, m * n, "backward")
        self.linear(part, m, n, k, bias=bias, weight=weight, dtype=dtype)

    def looped_linear(self, part: str, groups: int, m: int, n: int, k: int) -> None:
        """Add linear layers of experts in 8-bit floats, one expert after the other, and their gradients.

        Transformer Engine launches a product for each expert, and with current scaling converts the tokens
        of each with kernels of their own: the maximum and its reset, the scale, the conversion (in the time
        of the product, see `inner_linear`). All are launched in loops of C++. Experts have equally many
        tokens. The products use four streams; what overlaps at their ends is not modelled.

        Args:
            part: Part of the network.
            groups: Number of experts.
            m: Number of tokens of all experts.
            n: Width of the output.
            k: Width of the input.

        Source: NVIDIA/TransformerEngine, `common/gemm/cublaslt_gemm.cu` (`multi_stream_cublas_gemm`),
        `pytorch/csrc/extensions/cast.cpp` (`multi_tensor_quantize_impl`), `pytorch/csrc/quantizer.cpp`.
        """
        tokens, once = max(1, round(m / groups)), Tape(self.run)
        if self.run.fp8 == "current":
            for width, phase in ((k, "forward"), (n, "backward")):
                once.summed(part, tokens * width, phase)  # type: ignore[arg-type]
                for _ in range(SCALE_KERNELS):
                    once.moved(part, 0, phase)  # type: ignore[arg-type]
        once.linear(part, tokens, n, k, bias=False, dtype="e4m3")
        self.extend(
            replace(operation, count=groups * operation.count, loop=groups) for operation in once.operations
        )

    def grouped_linear(self, part: str, groups: int, m: int, n: int, k: int) -> None:
        """Add linear layers of several experts in one kernel, and the gradients of input and matrices.

        The gradient of the matrices is listed as a batch of equal products: the same number of tokens for
        each expert.

        Args:
            part: Part of the network.
            groups: Number of experts.
            m: Number of tokens of all experts.
            n: Width of the output.
            k: Width of the input.
        """
        sizes = {"groups": groups, "m": m, "dtype": self.run.dtype}
        self.add(part, _made(GroupedGemm, **sizes, n=n, k=k, trans="nt"))
        self.add(part, _made(GroupedGemm, **sizes, n=k, k=n, trans="nn"), "backward")
        tokens = max(1, round(m / groups))
        weights = _made(Gemm, batch=groups, m=n, n=k, k=tokens, dtype=sizes["dtype"], trans="tn")
        self.add(part, weights, "backward")

    def product(self, part: str, batch: int, m: int, n: int, k: int, trans: Literal["nn", "nt"]) -> None:
        """Add a batch of products of two tensors, and the gradients of both."""
        dtype = self.run.dtype
        self.add(part, _made(Gemm, batch=batch, m=m, n=n, k=k, dtype=dtype, trans=trans))
        back: Literal["nn", "nt"] = "nt" if trans == "nn" else "nn"
        self.add(part, _made(Gemm, batch=batch, m=m, n=k, k=n, dtype=dtype, trans=back), "backward")
        rows, cols = (k, n) if trans == "nn" else (n, k)
        self.add(part, _made(Gemm, batch=batch, m=rows, n=cols, k=m, dtype=dtype, trans="tn"), "backward")

    def attention(self, part: str, dimensions: Mapping[str, Any]) -> None:
        """Add attention as one kernel, given the dimensions of `Attention`."""
        work = _made(Attention, **dimensions)
        self.add(part, work)
        self.add(part, _changed(work, direction="backward"), "backward")

    def lookup(self, part: str, tokens: int, width: int, entries: int) -> None:
        """Add a look-up of rows in a table; its gradient has the size of the table and is mostly zeros."""
        self.copy(part, (tokens, width))
        table = entries * width * itemsize(self.run.dtype)
        self.moved(part, table + 2 * tokens * width * itemsize(self.run.dtype), "backward")

    # -- parameters -----------------------------------------------------------------------------

    def accumulated(self, parameters: int, kernels: int) -> None:
        """Add the accumulation of gradients over steps, with one kernel per tensor."""
        if not self.run.trains or not self.run.accumulate:
            return
        rows = max(1, round(parameters / (kernels * ROW)))
        work = _made(Elementwise, rows=rows, cols=ROW, dtype=self.run.gradient_dtype, expression="x+y")
        once = Operation(workload=work, part="gradients", phase="backward")
        self.extend([once], kernels)

    def sharded(self, parameters: int) -> None:
        """Add the copies of gathered parameters in both passes, and of gradients before they are divided.

        Source: pytorch, `torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py` (`split_with_sizes_copy`,
        `chunk_cat`).
        """
        if not self.run.sharded_parameters:
            return
        size = itemsize(self.run.dtype)
        self.moved("sharded parameters", 2 * size * parameters)
        if self.run.trains:
            self.moved("sharded parameters", 2 * size * parameters, "backward")
            gradient = size + itemsize(self.run.gradient_dtype)
            self.moved("sharded gradients", gradient * parameters, "backward")

    def updated(self, parameters: int, width: int = ROW) -> None:
        """Add the optimizer's update of all parameters, as kernels over many tensors at a time.

        Args:
            parameters: Number of parameters.
            width: Rows and columns of the matrices, for optimizers that multiply them: `parameters` are
                counted as square ones.
        """
        optimizer = find_optimizer(self.run.optimizer)
        rows = max(1, round(parameters / ROW))
        for expression in optimizer.fused_kernels if self.run.compiled else optimizer.kernels:
            self.elementwise("optimizer", (rows, ROW), expression, "optimizer")
        if optimizer.quantized:
            self.moved("optimizer", round(2 * optimizer.quantized_bytes * parameters), "optimizer")
        if optimizer.newton_schulz_steps:
            dtype = "f16" if self.run.dtype == "f16" else "bf16"
            work = _made(Gemm, m=width, n=width, k=width, dtype=dtype)
            product = Operation(workload=work, part="optimizer", phase="optimizer")
            matrices = max(1, round(parameters / width**2))
            self.extend([product], 3 * optimizer.newton_schulz_steps * matrices)
