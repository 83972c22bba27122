"""Code that inductor generates for calls of kernels.

As for any operator that it does not know, inductor would call `torch.ops.tunebench.kernel` and take the
memory that the operator allocates. The code generated here calls the kernel without torch's dispatcher, and
passes memory of inductor's plan, which earlier results of the graph have used.

Versions of torch without outputs that inductor allocates for operators call the operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V

from tunebench.torch.compiler._kernel_operator import compiled_call

__all__ = ["HAS_OUTPUTS"]

HAS_OUTPUTS = hasattr(ir, "ExternKernelMultiOut")
"""Whether inductor can allocate the outputs of operators, as torch 2.13 can."""

_KERNEL = torch.ops.tunebench.kernel.default
_IMPORT = f"from {compiled_call.__module__} import {compiled_call.__name__} as tunebench_call"

if HAS_OUTPUTS:

    class KernelCallNode(ir.ExternKernelMultiOut):  # type: ignore[misc]
        """A call of a kernel with its inputs, then its outputs, by position."""

        def codegen(self, wrapper: Any) -> None:
            """Write the call, and its function once per module."""
            device = str(self.get_device())
            workload, layouts = self.constant_args
            body = f"tunebench_call({workload!r}, {layouts!r}, {device!r})"
            name = wrapper.src_to_kernel.get(body)
            if name is None:
                name = wrapper.src_to_kernel[body] = f"tunebench_kernel_{wrapper.next_kernel_suffix()}"
                wrapper.add_import_once(_IMPORT)
                wrapper.define_kernel(name, body, gpu=False)
            self.python_kernel_name = name
            # Inductor plans no memory for results that nothing reads, which the kernel writes.
            outputs = self.out_variant_output_nodes
            unread = [output for output in outputs if output.get_name() in V.graph.removed_buffers]
            for output in unread:
                wrapper.writeline(wrapper.make_buffer_allocation(output))
            super().codegen(wrapper)
            for output in unread:
                wrapper.writeline(wrapper.make_buffer_free(output))

        def codegen_args(self) -> list[str]:
            """Return the names of the tensors."""
            outputs = [output.get_name() for output in self.out_variant_output_nodes]
            return [*(read.codegen_reference() for read in self.inputs), *outputs]

    @register_lowering(_KERNEL, type_promotion_kind=None)  # type: ignore[untyped-decorator]
    def _lowered(inputs: list[Any], workload: str, layouts: str) -> list[Any]:
        """Return the outputs of a call of a kernel as nodes of inductor."""
        device = inputs[0].get_device()
        if V.graph.cpp_wrapper or compiled_call(workload, layouts, str(device)).allocates:
            return fallback_handler(_KERNEL, add_to_fallback_set=False)(inputs, workload, layouts)  # type: ignore[no-any-return]
        with V.graph.fake_mode:
            examples, tensors, constants, unflatten, _ = ir.FallbackKernel.process_kernel(
                _KERNEL, inputs, workload, layouts
            )
        layout = ir.MultiOutputLayout(device=device)
        node = KernelCallNode(
            layout, _KERNEL, tensors, constants, unflatten, kwargs={}, out_op=_KERNEL, out_arg_names=[]
        )
        node.outputs = node.out_variant_output_nodes = [
            ir.AllocatingMultiOutput(
                layout=node.tensor_to_layout(example), input=node, indices=[(list, index)]
            )
            for index, example in enumerate(examples)
        ]
        return [output.wrap_for_lowering() for output in node.outputs]
