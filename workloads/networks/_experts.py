"""Transformers with a mixture of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, gpt-oss, Llama 4, DeepSeek.

The first layers of DeepSeek's models are dense. Node-limited routing adds kernels to the router; it does not
change how many rows a device sends, because every row goes to its expert on its own.

A router sends each token to some of the experts, which are gated feed-forward layers. Which ones is data:
operations assume that experts have equally many tokens, `NetworkRun.expert_load` times as many on the busiest
device of expert parallelism. Kernels are those of HuggingFace's eager code, which runs one expert after the
other (Llama 4: all experts on all tokens), or those of Megatron-LM
(`tunebench.workloads.networks.megatron`). The loss that balances experts is part of Megatron-LM's router.
HuggingFace's code computes it once per pass, which is left out.

Source: transformers 4.36, `models/mixtral/modeling_mixtral.py`.
"""

from __future__ import annotations

from tunebench.errors import InputError
from tunebench.workloads.networks._families import Llama
from tunebench.workloads.networks.architecture import Architecture
from tunebench.workloads.networks.megatron import GROUP_KERNELS, expert_collectives, gate_expression
from tunebench.workloads.networks.network_run import NetworkRun, TensorCollective
from tunebench.workloads.networks.tape import Tape
from tunebench.workloads.networks.transformer import Matrix, share

__all__ = ["Mixture"]

ROUTING_KERNELS = 8
"""Small kernels of a layer's router in eager PyTorch: conversion, softmax, choice, its sum, quotient and
conversion, and two of the mask of experts."""


class Mixture(Llama):
    """A transformer with Llama's attention and experts in every layer after the first dense ones."""

    def __init__(self, name: str, architecture: Architecture) -> None:
        super().__init__(name, architecture)
        self._parameters_of_experts: dict[int, int] = {}

    def matrices(self) -> tuple[Matrix, ...]:
        """Return the linear layers that all tokens see, without the router."""
        architecture = self.architecture
        if not architecture.experts:
            return super().matrices()
        shared = self._feed_forward_matrices(architecture.shared_ffn) if architecture.shared_ffn else ()
        return (*self._attention_matrices(), *shared)

    # -- parameters -----------------------------------------------------------------------------

    def expert_parameters(self, tensor: int = 1, layers: tuple[int, int] | None = None) -> int:
        """Return the parameters of all experts of these layers (see `Network.expert_parameters`)."""
        return self._sparse_layers(layers) * self._routed_parameters(tensor)

    def _routed_parameters(self, tensor: int) -> int:
        """Return the parameters of the experts of a layer that has them."""
        if tensor not in self._parameters_of_experts:
            matrices = self._feed_forward_matrices(self.architecture.ffn)
            per_expert = sum(matrix.parameters(tensor) for matrix in matrices)
            self._parameters_of_experts[tensor] = self.architecture.experts * per_expert
        return self._parameters_of_experts[tensor]

    def _sparse_layers(self, layers: tuple[int, int] | None) -> int:
        """Return how many of these layers have experts."""
        inner_layers = self._inner_layers(layers or (0, self.layers))
        return max(0, inner_layers.stop - max(inner_layers.start, self.architecture.dense_layers))

    def _layer_parameters(self, index: int, tensor: int = 1) -> int:
        outside_experts = super()._layer_parameters(index, tensor)
        architecture = self.architecture
        if index < architecture.dense_layers or not architecture.experts:
            return outside_experts
        gate = architecture.hidden if architecture.shared_gate else 0
        router = architecture.experts * (architecture.hidden + architecture.router_bias)
        return outside_experts + gate + router + self._routed_parameters(tensor)

    def _layer_tensors(self, index: int, run: NetworkRun) -> int:
        tensors = super()._layer_tensors(index, run)
        architecture = self.architecture
        if index < architecture.dense_layers:
            return tensors
        tensors += 1 + architecture.router_bias + architecture.shared_gate
        grouped = 2 if run.kernels == "megatron" else 3 * architecture.experts  # one for a grouped product
        return tensors + grouped * (1 + architecture.mlp_bias)

    def _divided_products(self, index: int, run: NetworkRun) -> int:
        """Return the number of sums of a layer: Megatron-LM sums the results of experts on their way back."""
        if index < self.architecture.dense_layers:
            return 2
        return 1 + (run.kernels != "megatron" or bool(self.architecture.shared_ffn))

    # -- operations -----------------------------------------------------------------------------

    def collectives(self, run: NetworkRun) -> tuple[TensorCollective, ...]:
        """Return the collectives of tensor parallelism, and those that exchange tokens between experts."""
        sparse = self._sparse_layers(self.stage(run))
        experts = expert_collectives(run, self.architecture, sparse) if sparse else ()
        return (*super().collectives(run), *experts)

    def _add_layer(self, tape: Tape, index: int) -> None:
        if tape.run.kernels == "megatron":
            self._add_fused_layer(tape)
            return
        if not self.architecture.experts:
            super()._add_layer(tape, index)
            return
        self._attention(tape)
        self._norm(tape)
        if tape.run.serves:
            self._grouped_experts(tape)
        elif self.architecture.family == "llama4_text":
            self._experts_of_all_tokens(tape)
        else:
            self._experts(tape)
        self._shared(tape)
        tape.elementwise("experts", self._shape(tape.run), "x+y", "backward")  # router and experts
        self._added(tape)

    def _experts(self, tape: Tape) -> None:
        """Add the router, then each expert: gather its tokens, apply its layers, add the results."""
        architecture, shape = self.architecture, self._shape(tape.run)
        tape.linear("router", shape[0], architecture.experts, architecture.hidden, bias=False)
        for _ in range(ROUTING_KERNELS):
            tape.pointwise("router", (shape[0], architecture.experts), "x", ("x",))
        for _ in range(GROUP_KERNELS if architecture.expert_groups else 0):
            tape.elementwise("router", (shape[0], architecture.experts), "x")
        tape.elementwise("experts", shape, "x")  # zeros
        tokens = max(1, round(shape[0] * architecture.experts_per_token / architecture.experts))
        taken = (tokens, architecture.hidden)
        for _ in range(architecture.experts):
            tape.elementwise(
                "router", (shape[0], architecture.experts_per_token), "x", alone=True
            )  # which tokens
            tape.copy("experts", taken)
            self._gated(tape, tokens, self._feed_forward_matrices(architecture.ffn))
            tape.elementwise("experts", taken, "x+y", "backward")  # gradients of the input of two products
            tape.pointwise("experts", taken, "x*row", ("dy*row", "dy*x"))
            tape.pointwise("experts", taken, "x+y", ("x",))
            tape.elementwise("experts", shape, "x", "backward")  # zeros, and the tokens' gradients
            tape.copy("experts", taken, "backward")
            tape.elementwise("experts", shape, "x+y", "backward")

    def _grouped_experts(self, tape: Tape) -> None:
        """Add the router, and all experts in one kernel for each of two products.

        Source: vLLM, `model_executor/layers/fused_moe`: choice of experts, sorting, two grouped products with
        the activation between them, sum.
        """
        architecture, (tokens, hidden) = self.architecture, self._shape(tape.run)
        experts = architecture.experts
        tape.linear("router", tokens, experts, hidden, bias=False)
        for _ in range(2):
            tape.pointwise("router", (tokens, experts), "x")
        rows, width = tokens * architecture.experts_per_token, share(architecture.ffn, tape.run.tensor)
        tape.grouped_linear("experts", experts, rows, 2 * width, hidden)
        tape.pointwise("experts", (rows, width), f"{gate_expression(architecture)}*y")
        tape.grouped_linear("experts", experts, rows, hidden, width)
        tape.summed("experts", rows * hidden)

    def _experts_of_all_tokens(self, tape: Tape) -> None:
        """Add the router, and all experts as batched products of all tokens, scaled by 0 where not routed.

        Source: transformers 4.57, `models/llama4/modeling_llama4.py`.
        """
        architecture, shape = self.architecture, self._shape(tape.run)
        tape.linear("router", shape[0], architecture.experts, architecture.hidden, bias=False)
        for _ in range(ROUTING_KERNELS):
            tape.pointwise("router", (shape[0], architecture.experts), "x", ("x",))
        rows = architecture.experts * shape[0]
        width = share(architecture.ffn, tape.run.tensor)
        tape.copy("experts", (rows, architecture.hidden))
        tape.pointwise("experts", (rows, architecture.hidden), "x*row", ("dy*row", "dy*x"))
        tape.product("experts", architecture.experts, shape[0], 2 * width, architecture.hidden, "nn")
        tape.activation("experts", (rows, width), architecture.activation)
        tape.pointwise("experts", (rows, width), "x*y", ("dy*x", "dy*y"))
        tape.product("experts", architecture.experts, shape[0], architecture.hidden, width, "nn")
        for phase in ("forward", "backward"):
            tape.summed("experts", rows * architecture.hidden, phase)
        tape.residual("experts", shape)

    def _shared(self, tape: Tape) -> None:
        """Add the expert that sees all tokens, if there is one, with its gate."""
        architecture, shape = self.architecture, self._shape(tape.run)
        if not architecture.shared_ffn:
            return
        self._gated(tape, shape[0], self._feed_forward_matrices(architecture.shared_ffn))
        tape.elementwise("mlp up", shape, "x+y", "backward")
        if architecture.shared_gate:
            tape.linear("router", shape[0], 1, architecture.hidden, bias=False)
            tape.pointwise("experts", shape, "x*row", ("dy*row", "dy*x"))
        tape.residual("experts", shape)

    def _check(self, run: NetworkRun) -> None:
        super()._check(run)
        architecture = self.architecture
        if architecture.shared_ffn % run.tensor:
            raise InputError(
                f"{self.name}: tensor={run.tensor} must divide the {architecture.shared_ffn} of its shared "
                "expert"
            )
        if architecture.experts and architecture.experts % run.expert:
            raise InputError(
                f"{self.name}: expert={run.expert} must divide its {architecture.experts} experts"
            )
        if run.trains and run.kernels == "megatron" and run.tensor > 1 and not run.sequence_parallel:
            raise InputError(
                f"{self.name}: tensor parallelism of a model with experts needs sequence parallelism in "
                "Megatron-LM: set sequence_parallel"
            )
