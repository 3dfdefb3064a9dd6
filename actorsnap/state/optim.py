# SPDX-License-Identifier: Apache-2.0
"""Primes optimizers, and names states independently of the parallelism."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, Final

import torch

from actorsnap.errors import UsageError, describe
from actorsnap.state.devices import fork_generators
from actorsnap.tracebacks import short_traceback
from actorsnap.wording import printable


@short_traceback
def prime_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Creates the state that an optimizer has only after its first step, so a restore can fill it.

    Tensors get the shapes, dtypes, devices and placements that the optimizer would give them. For
    torch's own classes, they get the values before the first step, so training may continue without
    a restore. The one exception is SGD with dampening, which then dampens the first gradient.
    Parameters, gradients, learning rates, hooks, step counters and random generators do not change.
    Skips parameters that have state or require no gradients.

    Classes outside of torch.optim run one step on zeros instead of the parameters. Step counters in
    their state are then set to 0.

    Raises:
        UsageError: The optimizer cannot be primed. Run one step instead.
    """
    kind = type(optimizer)
    if not hasattr(optimizer, "param_groups"):
        raise UsageError(f"prime_optimizer takes a torch.optim.Optimizer, not a {kind.__name__}")
    if "ZeroRedundancyOptimizer" in [base.__name__ for base in kind.__mro__]:
        raise UsageError(
            "a ZeroRedundancyOptimizer has no state of its own; prime its .optim, or run one step"
        )
    groups = []
    for group in optimizer.param_groups:
        lacking = [p for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
        if lacking:
            groups.append((group, lacking))
    if not groups:
        return
    init = getattr(kind, "_init_group", None)
    # Keeps the step out of autograd graphs, and makes no inference tensors.
    with torch.inference_mode(False), torch.no_grad():
        if isinstance(optimizer, torch.optim.LBFGS):
            _prime_lbfgs(optimizer)
        elif isinstance(optimizer, torch.optim.SparseAdam):
            for _, parameters in groups:
                for parameter in parameters:
                    optimizer.state[parameter].update(
                        step=0, exp_avg=_zeros(parameter), exp_avg_sq=_zeros(parameter)
                    )
        elif getattr(init, "__module__", "").startswith("torch.optim."):
            for group, parameters in groups:
                _init_group(optimizer, group, parameters)
        else:
            _step_on_zeros(optimizer, groups)


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _adopt(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    stand_ins: Sequence[torch.Tensor],
) -> None:
    for parameter, stand_in in zip(parameters, stand_ins, strict=True):
        state = optimizer.state.pop(stand_in, None)
        if state:
            optimizer.state[parameter] = state
        elif not optimizer.state.get(parameter):
            optimizer.state.pop(parameter, None)


def _init_group(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[torch.Tensor]
) -> None:
    """Runs the part of torch's step that creates state."""
    stand_ins = [parameter.detach() for parameter in parameters]
    for parameter, stand_in in zip(parameters, stand_ins, strict=True):
        # Only the gradient's presence, shape and dtype matter.
        stand_in.grad = parameter.detach()
    init: Any = optimizer._init_group  # type: ignore[attr-defined]
    lists: list[list[Any]] = [
        [] for p in list(signature(init).parameters.values())[1:] if p.default is Parameter.empty
    ]
    try:
        init({**group, "params": stand_ins}, *lists)
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0:
            for stand_in in stand_ins:
                optimizer.state[stand_in]["momentum_buffer"] = _zeros(stand_in)
    finally:
        _adopt(optimizer, parameters, stand_ins)


def _prime_lbfgs(optimizer: torch.optim.LBFGS) -> None:
    # The first parameter has all state, which the first iteration overwrites.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if optimizer.state.get(parameters[0]):
        return
    if any(type(p) not in (torch.Tensor, torch.nn.Parameter) for p in parameters):
        raise UsageError("LBFGS over distributed parameters cannot be primed; run one step")
    count = sum([p.numel() * (2 if p.is_complex() else 1) for p in parameters])
    flat = torch.view_as_real(parameters[0]) if parameters[0].is_complex() else parameters[0]
    optimizer.state[parameters[0]].update(
        func_evals=0,
        n_iter=0,
        d=flat.new_zeros(count),
        t=0.0,
        old_dirs=[],
        old_stps=[],
        ro=[],
        H_diag=1,
        prev_flat_grad=flat.new_zeros(count),
        prev_loss=0.0,
    )


_COUNTERS: Final = ("step", "steps", "n_iter")


def _step_on_zeros(
    optimizer: torch.optim.Optimizer, groups: Sequence[tuple[dict[str, Any], list[torch.Tensor]]]
) -> None:
    before = []
    for group in optimizer.param_groups:
        tensors = [value for value in group.values() if isinstance(value, torch.Tensor)]
        before.append((group, dict(group), [(tensor, tensor.clone()) for tensor in tensors]))
    stand_ins: dict[int, list[torch.Tensor]] = {}
    for group, parameters in groups:
        made = [torch.nn.Parameter(_zeros(p.detach())) for p in parameters]
        for stand_in in made:
            stand_in.grad = torch.zeros_like(stand_in)
        stand_ins[id(group)] = [*made]
    # ``step`` without hooks.
    step: Any = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    try:
        for group in optimizer.param_groups:
            group["params"] = stand_ins.get(id(group), [])
        with fork_generators(p for _, found in groups for p in found), torch.enable_grad():
            step(optimizer)
    except Exception as error:
        raise UsageError(
            f"{type(optimizer).__name__} cannot be primed ({describe(error)}); "
            "run one step before the restore"
        ) from error
    finally:
        for group, old, values in before:
            group.clear()
            group.update(old)
            for tensor, value in values:
                tensor.detach().copy_(value)
        for group, parameters in groups:
            _adopt(optimizer, parameters, stand_ins[id(group)])
    for state in [optimizer.state[p] for _, found in groups for p in found if p in optimizer.state]:
        for name in _COUNTERS:
            value = state.get(name)
            if isinstance(value, torch.Tensor):
                value.zero_()
            elif isinstance(value, int | float):
                state[name] = type(value)(0)


def class_names(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Returns qualified names, sorted, joined by commas."""
    return ", ".join(sorted({_qualified(_class_of(optimizer)) for optimizer in optimizers}))


def takes_state_of(optimizers: Sequence[torch.optim.Optimizer], saved: str) -> bool:
    """Whether classes match ``saved`` (``class_names``).

    A class may have moved to another module, but not into or out of torch. A class outside of torch
    also takes its base classes' state.
    """
    names = set(map(_identity, saved.split(", ")))
    matched: set[tuple[bool, str]] = set()
    for kind in set(map(_class_of, optimizers)):
        is_torchs, _ = _identity(_qualified(kind))
        bases = (kind,) if is_torchs else kind.__mro__
        matching = names.intersection([_identity(_qualified(base)) for base in bases])
        if not matching:
            return False
        matched |= matching
    return matched == names


def _class_of(optimizer: torch.optim.Optimizer) -> type:
    """Looks into wrappers (accelerate's)."""
    inner = vars(optimizer).get("optimizer")
    return _class_of(inner) if isinstance(inner, torch.optim.Optimizer) else type(optimizer)


def _qualified(kind: type) -> str:
    return printable(f"{kind.__module__}.{kind.__qualname__}")


def _identity(name: str) -> tuple[bool, str]:
    """Returns what must match: whether the class is torch's, and the end of its name."""
    return name.startswith("torch."), name.rpartition(".")[2]


def submodules_of(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Returns each module and submodule once; 4 x as fast as ``Module.modules()``."""
    seen = dict.fromkeys(modules)
    parts = list(seen)
    for module in parts:  # grows
        for part in module._modules.values():
            if part is not None and part not in seen:
                seen[part] = None
                parts.append(part)
    return parts


def plain_name(module: torch.nn.Module, name: str) -> str:
    """Returns a name without the parts of wrappers (DDP, compile)."""
    parts = []
    at: Any = module
    for part in name.split("."):
        if not (part in ("module", "_orig_mod") and _is_wrapper(at, part)):
            parts.append(part)
        at = getattr(at, part, None)
    return ".".join(parts)


def _is_wrapper(module: object, part: str) -> bool:
    kind = type(module)
    if part == "_orig_mod":
        return kind.__module__ == "torch._dynamo.eval_frame"
    return any(base.__module__ == "torch.nn.parallel.distributed" for base in kind.__mro__)


class ModelState:
    """A model and its optimizers as one stateful, with names independent of the parallelism.

    The state is that of ``torch.distributed.checkpoint.state_dict.get_state_dict``, in its sharded
    form, keyed by parameter name without the prefixes of DistributedDataParallel, FSDP and
    ``torch.compile``. It can be restored under another wrapper, on another mesh, with other
    pipeline stages, or in one process.

    With FSDP1 (``FullyShardedDataParallel``), both methods are collective. Otherwise, no rank waits
    for another.

    Args:
        model: The model, wrapped as for training.
        optimizers: None, one or several.
        flatten: Store hyperparameters per parameter, as pipeline stages need. False stores them per
            parameter group, which is smaller with many parameters, and necessary if the optimizer
            state has values other than tensors and numbers. With distributed parameters, a restore
            needs the same setting as the save.
    """

    @short_traceback
    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
        *,
        flatten: bool = True,
    ) -> None:
        optimizers = tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,)
        wrong = [o for o in optimizers if not isinstance(o, torch.optim.Optimizer)]
        first: object = model
        has_model = any(isinstance(each, torch.nn.Module) for each in wrong)
        if isinstance(first, torch.optim.Optimizer) and has_model:
            raise UsageError(
                "the arguments are swapped; the model comes first: ModelState(model, optimizers)"
            )
        if not isinstance(model, torch.nn.Module) or wrong:
            raise UsageError("ModelState takes a torch.nn.Module, and torch.optim.Optimizers")
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise UsageError(
                "torch cannot name the state of LBFGS by parameters; save the optimizer itself"
            )
        self.model = model
        self.optimizers = optimizers
        self.flatten = flatten

    def state_dict(self) -> dict[str, Any]:
        """Returns ``model`` and, with optimizers, ``optim``. Tensors are not copied.

        Primes optimizers without state.

        Raises:
            UsageError: An optimizer has parameters that are not in the model, or cannot be primed.
        """
        from torch.distributed.checkpoint import state_dict as names

        self._prime()
        state: dict[str, Any] = {"model": names.get_model_state_dict(self.model)}
        if self.optimizers:
            state["optim"] = names.get_optimizer_state_dict(
                self.model, self.optimizers, options=self._options(names, strict=True)
            )
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Loads a state that ``state_dict`` returned.

        Args:
            strict: Refuse missing and unexpected names in the model.
        """
        from torch.distributed.checkpoint import state_dict as names

        options = self._options(names, strict=strict)
        self._prime()
        # torch removes items.
        names.set_model_state_dict(self.model, dict(state_dict["model"]), options=options)
        if self.optimizers and "optim" in state_dict:
            names.set_optimizer_state_dict(
                self.model, self.optimizers, dict(state_dict["optim"]), options=options
            )

    def _options(self, names: Any, *, strict: bool) -> Any:
        return names.StateDictOptions(strict=strict, flatten_optimizer_state_dict=self.flatten)

    def _prime(self) -> None:
        _reshard(self.model)
        own = set(map(id, self.model.parameters()))
        for optimizer in self.optimizers:
            if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
                raise UsageError(
                    "the optimizer has parameters that are not in the model: create it after "
                    "fully_shard, and after anything else that replaces parameters"
                )
        # Else torch runs a step, which drops gradients.
        for optimizer in self.optimizers:
            prime_optimizer(optimizer)


def _reshard(model: torch.nn.Module) -> None:
    """Puts back the sharded parameters of ``fully_shard``, as its hooks of ``state_dict`` do.

    The outer module holds the whole ones from a forward pass to its backward pass, so also after an
    evaluation.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def parts_of(stateful: object) -> tuple[torch.nn.Module | None, tuple[torch.optim.Optimizer, ...]]:
    """Returns the module and the optimizers in a stateful of an app state."""
    if isinstance(stateful, ModelState):
        return stateful.model, stateful.optimizers
    module = stateful if isinstance(stateful, torch.nn.Module) else None
    return module, (stateful,) if isinstance(stateful, torch.optim.Optimizer) else ()
