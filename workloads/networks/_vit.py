"""Vision transformers: a stack of pre-normalised layers on the patches of an image.

Source: Dosovitskiy et al., "An image is worth 16x16 words", 2021; transformers 4.57, `models/vit`, eager
attention.
"""

from __future__ import annotations

from dataclasses import replace

from tunebench.errors import InputError
from tunebench.workloads.networks._families import Decoder
from tunebench.workloads.networks.megatron import add_megatron_layer
from tunebench.workloads.networks.network_run import NetworkRun, Operation
from tunebench.workloads.networks.tape import Tape
from tunebench.workloads.networks.transformer import Matrix

__all__ = ["Vit"]


class Vit(Decoder):
    """ViT: a classifier of images, whose sequence is the patches of an image and one token for the class."""

    divides_ends = False

    def matrices(self) -> tuple[Matrix, ...]:
        """Return the linear layers of a layer."""
        *qkv, output, up, down = super().matrices()
        biased = self.architecture.biased_qkv
        return (*(replace(matrix, bias=biased) for matrix in qkv), output, up, down)

    def before(self) -> int:
        """Return the matrix of patches, the token of the class, and the positions."""
        architecture = self.architecture
        pixels = architecture.patch**2 * architecture.channels
        return (pixels + 1 + 1 + architecture.tokens) * architecture.hidden

    def behind(self) -> int:
        """Return the last normalisation, and the bias of the classes."""
        return 2 * self.architecture.hidden + self.architecture.vocabulary

    def operations(self, run: NetworkRun) -> tuple[Operation, ...]:
        """Return the operations of one device in one run (see `Network.operations`), on whole images."""
        return super().operations(self._on_images(run))

    def boundary_elements(self, run: NetworkRun) -> int:
        """Return the number of elements in the hidden states of all patches."""
        return super().boundary_elements(self._on_images(run))

    def _on_images(self, run: NetworkRun) -> NetworkRun:
        tokens = self.architecture.tokens
        if run.seq not in (0, tokens):
            raise InputError(
                f"{self.name} has {tokens} tokens for an image of {self.architecture.image} pixels: expected "
                f"seq=0, got {run.seq}"
            )
        return replace(run, seq=tokens)

    def _embedding(self, tape: Tape) -> None:
        run, architecture = tape.run, self.architecture
        patches = run.batch * (architecture.tokens - 1)
        pixels = architecture.patch**2 * architecture.channels
        tape.linear("embedding", patches, architecture.hidden, pixels)
        tape.copy("embedding", self._shape(run))  # concatenation with the token of the class
        tape.pointwise("embedding", self._shape(run), "x+row")
        tape.dropout("embedding", self._shape(run), architecture.dropout)

    def _add_layer(self, tape: Tape, index: int) -> None:
        if tape.run.kernels == "megatron":
            add_megatron_layer(tape, self.architecture, gated=False, rms=False, biased=True)
            return
        *qkv, output, up, down = self.matrices()
        self._norm(tape)
        for matrix in qkv:
            matrix.on(tape, tape.run.batch * tape.run.seq)
        self._attend(tape, output, ("x*0.125",), ("x*0.125",))
        self._feed_forward(tape, up, down)

    def _head(self, tape: Tape) -> None:
        run, architecture = tape.run, self.architecture
        self._norm(tape)
        tape.linear("head", run.batch, architecture.vocabulary, architecture.hidden)
        tape.loss("loss", run.batch, architecture.vocabulary)
