"""A network as ``torch.export`` sees it: the graph that three of the formats are made of, and what it lacks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export

from fedtailor.deploying.inputs import Inputs, names_of
from fedtailor.elasticity.costing.cost import plain_attention
from fedtailor.errors import FedtailorError

LOGGERS = ("torch", "torch.onnx", "torch.export", "onnxscript", "onnx_ir", "executorch", "torchao", "root")


def exported(module: nn.Module, example: Inputs, any_batch: bool) -> ExportedProgram:
    """The graph of a module in evaluation mode, for any number of examples or for exactly one."""
    inputs = example.rows(0, 2 if any_batch else 1)
    if any_batch and len(inputs) < 2:  # one example is no sign of an axis of examples
        inputs = Inputs(
            tuple(torch.cat([each, each]) for each in inputs.args),
            {name: torch.cat([each, each]) for name, each in inputs.kwargs.items()},
        )
    batch = Dim("batch", min=1)
    shapes = {name: {0: batch} for name in names_of(module, inputs)} if any_batch else None
    with torch.no_grad(), quiet(), plain_attention():
        try:
            return export(module.eval(), inputs.args, dict(inputs.kwargs), dynamic_shapes=shapes)
        except Exception as error:  # of the user's own code, or of torch.export: any class
            raise FedtailorError(
                f"the network cannot be exported{' for any number of examples' if any_batch else ''}: "
                f"{type(error).__name__}: {first_line(error)}; --format safetensors writes its weights"
            ) from error


def refusal(form: str, program: ExportedProgram, error: Exception) -> FedtailorError:
    """The error for an operator that a format does not know: its name, and the layer in which it stands."""
    text = f"{error} {error.__cause__ or ''}"
    for node in program.graph.nodes:
        if node.op == "call_function" and (name := _operator(node)) and _named_in(name, text):
            return FedtailorError(
                f"--format {form}: it does not know the operator {name} of {layer_of(node)}; another format may "
                "(pt2 knows all that PyTorch knows), nothing was written"
            )
    return FedtailorError(
        f"--format {form}: the network cannot be converted: {type(error).__name__}: {first_line(error)}"
    )


def layer_of(node: fx.Node) -> str:
    """The layer that a node of an exported graph belongs to, as the user calls it."""
    stack = node.meta.get("nn_module_stack") or {}
    entries = [entry for entry in stack.values() if isinstance(entry, tuple) and len(entry) == 2]
    if not entries:
        return "the network"
    path, kind = entries[-1]
    name = str(path).removeprefix("L['self'].").removeprefix("network").removeprefix(".")
    shown = kind if isinstance(kind, str) else kind.__qualname__
    return (
        f"layer {name} ({shown.rpartition('.')[2]})" if name else f"the network ({shown.rpartition('.')[2]})"
    )


def _operator(node: fx.Node) -> str:
    target = node.target
    return str(target) if isinstance(target, torch._ops.OpOverload) else ""


def _named_in(name: str, text: str) -> bool:
    """Whether an error speaks of an operator, with or without its overload, in either spelling."""
    plain = name.rpartition(".")[0]
    return any(each in text for each in {plain, plain.replace(".", "::", 1)})


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:300].rstrip(".")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the notes that converters write for their own developers; errors are raised all the same."""
    found = [logging.getLogger(None if name == "root" else name) for name in LOGGERS]
    levels = [logger.level for logger in found]
    for logger in found:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(found, levels, strict=True):
            logger.setLevel(level)
