"""ONNX models as modules of torch, whose steps `tunebench.graph.extract_onnx` traces."""
