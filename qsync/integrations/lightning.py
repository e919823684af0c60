"""Lightning strategy that plans the model before Lightning wraps it in DDP."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn

from qsync.distributed.agreement import agree_locally, check_same
from qsync.distributed.data_parallel import check_ddp_options, stated_options
from qsync.distributed.share_sampler import RankSampler, ShareSampler, sampler_of
from qsync.errors import FormatError, UnsupportedError, shortened
from qsync.hybrid_training.hybrid_job import hybrid
from qsync.integrations.supported_versions import check_version
from qsync.integrations.trainer_plans import check_hybrid_options, needs_sampler, warn_of_other_plan
from qsync.predictor.profiling.loader_wait import undrawn
from qsync.records.plans import Plan
from qsync.runtime.wrapping import plan_of, wrapping_of
from qsync.tracing.held_state import undisturbed

_PLAN_KEY = "qsync_plan"  # the plan's key in a checkpoint
_BASES = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


class QSyncStrategy(DDPStrategy):
    """Lightning strategy: DDPStrategy over unequal ranks.

    Before Lightning wraps the LightningModule in DDP, qsync plans the network that `training_step` calls, on
    a batch of the training data: the LightningModule itself (`self(x)`), or the one submodule with trained
    parameters. Lightning's `precision="bf16-mixed"` sets the plan's base; DDP's arguments also apply to
    profiling. A checkpoint holds its plan, and loads with or without qsync. A training loader with a
    `qsync.ShareSampler` yields batches of the rank's planned share.

    Args:
        hybrid_options: arguments of `qsync.hybrid` by name, such as `emulated_share`, `make_optimizer` or
            `example_batch`. With manual optimization `loss_fn` is needed, too.
        **options: DDPStrategy's, with DDP's arguments among them.

    Raises:
        UnsupportedError: another version of the library, or a training_step that calls several networks.
        FormatError: options that the strategy sets itself, or shares without a sampler for them.
        MismatchError: ranks with different settings.

    Importing this module also registers the strategy under the name "qsync", without options.

    Example:
        >>> trainer = pl.Trainer(devices=2, strategy=QSyncStrategy(hybrid_options={"slack": 0.05}))
        >>> trainer = pl.Trainer(devices=2, strategy="qsync")
    """

    strategy_name = "qsync"

    def __init__(self, *, hybrid_options: Mapping[str, Any] | None = None, **options: Any) -> None:
        check_version("lightning")
        super().__init__(**options)
        check_ddp_options(self._ddp_kwargs)
        self._ddp_kwargs = stated_options(self._ddp_kwargs)  # LightningCLI passes every DDP default
        self._hybrid_options = dict(hybrid_options or {})
        self._plan_before: Any = None  # JSON of the plan in the loaded checkpoint
        self._sampler: ShareSampler | None = None  # of the loader that the plan was made with

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the strategy's name with Lightning; DDPStrategy's names stay its own."""
        strategy_registry.register(cls.strategy_name, cls, description=cls.__doc__ or "", override=True)

    def configure_ddp(self) -> None:
        """Plan the LightningModule's network, then let Lightning wrap the module in DDP."""
        module = self.lightning_module
        assert module is not None
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(self.num_processes))
        stated = {"base", "ddp", "ddp_options", "loader"}
        agree_locally(
            "checking the Trainer's arguments", lambda: check_hybrid_options(self._hybrid_options, stated)
        )
        trainer = module.trainer
        # Lightning would shard batches that already belong to this rank.
        connector = trainer._data_connector
        is_cut = connector._requires_distributed_sampler
        setattr(connector, "_requires_distributed_sampler", lambda loader: (  # noqa: B010
            not isinstance(getattr(loader, "batch_sampler", None), RankSampler) and is_cut(loader)
        ))  # fmt: skip
        check_same({f"the Trainer's {name}": getattr(trainer, name) for name in (
            "accumulate_grad_batches", "precision", "gradient_clip_val", "max_epochs", "max_steps",
        )})  # fmt: skip
        with _without_logs(module):
            network, arguments = agree_locally("finding the network", lambda: self._arguments(module))
            hybrid(network, ddp=False, **arguments)
        if self._plan_before is not None:
            warn_of_other_plan(partial(Plan.from_json, self._plan_before), plan_of(network))
        super().configure_ddp()

    def _arguments(self, module: pl.LightningModule) -> tuple[nn.Module, dict[str, Any]]:
        """Return the network to plan, and the arguments of `qsync.hybrid`."""
        base = _BASES.get(str(self.precision_plugin.precision))
        found = {"base": base, "ddp_options": self._ddp_kwargs, **self._hybrid_options}
        loaders = self._loaders(module)
        samplers = [sampler for sampler in map(sampler_of, loaders.flattened) if sampler is not None]
        if len(loaders.flattened) == 1 and samplers:
            (self._sampler,), (found["loader"],) = samplers, loaders.flattened
        else:
            needs_sampler(found, "the Trainer's one training loader has no qsync.ShareSampler")
        batch = found.get("example_batch")
        if batch is None:
            batch = found["example_batch"] = self._example_batch(module, loaders)
        if "loss_fn" in found:
            if type(module).forward in (nn.Module.forward, pl.LightningModule.forward):
                raise FormatError(
                    f"{type(module).__name__} has no forward, which planning with loss_fn needs; add a "
                    "forward that calls its networks"
                )
            return module, found
        if not module.automatic_optimization:
            raise FormatError(
                "manual optimization returns no loss for profiling; give "
                'hybrid_options={"loss_fn": lambda module, batch: ...}'
            )
        step = _TrainingStep(module, self.precision_plugin.train_step_context)
        network, found["loss_fn"] = step.network(batch), step
        return network, found

    def _loaders(self, module: pl.LightningModule) -> CombinedLoader:
        """Return the loaders of the training data, which Lightning will request again."""
        with undisturbed(module):
            torch.manual_seed(0)
            return CombinedLoader(module.trainer.fit_loop._data_source.dataloader(), "max_size_cycle")

    def _example_batch(self, module: pl.LightningModule, loaders: CombinedLoader) -> Any:
        """Return a training batch as training_step gets it, equal on every rank."""
        with ExitStack() as stack:
            stack.enter_context(undisturbed(module))
            torch.manual_seed(0)
            if self._sampler is not None:
                stack.enter_context(self._sampler.drawing(self._sampler.global_batch // self.world_size))
            for loader in loaders.flattened:
                stack.enter_context(undrawn(loader))
            batch, *_ = next(iter(loaders))
            batch = module._on_before_batch_transfer(self.precision_plugin.convert_input(batch))
            return self.batch_to_device(batch)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Make a loader yield the plan's shares, and report its sampler's position to Lightning."""
        sampler = sampler_of(dataloader)
        if sampler is not None and self._sampler is not None:
            sampler.share_as(self._sampler)
            dataloader.state_dict, dataloader.load_state_dict = sampler.state_dict, sampler.load_state_dict
        return super().process_dataloader(dataloader)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint with its plan."""
        module = self.lightning_module
        found = map(wrapping_of, module.modules()) if module is not None else ()
        plans = [wrapping.plan for wrapping in found if wrapping is not None and wrapping.plan is not None]
        if plans:
            checkpoint[_PLAN_KEY] = plans[0].to_json()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, and remember its plan for comparison."""
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self._plan_before = checkpoint.get(_PLAN_KEY)
        return checkpoint


class _TrainingStep:
    """Adapts training_step of a LightningModule to `qsync.hybrid`'s loss function."""

    def __init__(
        self, module: pl.LightningModule, context: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._module, self._context = module, context
        self._path = ""  # the network's path in the module

    def network(self, batch: Any) -> nn.Module:
        """Return the outermost network with trained parameters that training_step calls."""
        called: dict[str, nn.Module] = {}
        depth = 0

        def enter(name: str, one: nn.Module) -> None:
            nonlocal depth
            if depth == 0 and any(p.requires_grad for p in one.parameters()):
                called[name] = one
            depth += 1

        def leave() -> None:
            nonlocal depth
            depth -= 1

        with ExitStack() as hooks, undisturbed(self._module):
            for name, one in self._module.named_modules():
                before = one.register_forward_pre_hook(lambda *_, name=name, one=one: enter(name, one))
                after = one.register_forward_hook(lambda *_: leave(), always_call=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            try:
                self(self._module, batch)
            except (AttributeError, TypeError, KeyError, IndexError) as error:
                raise UnsupportedError(
                    f"training_step of {type(self._module).__name__} fails during planning, before "
                    f"optimizers exist and on_train hooks run ({shortened(error, 200)}); give "
                    'hybrid_options={"loss_fn": lambda module, batch: ...}'
                ) from error
        if len(called) != 1:
            names = " and ".join(called) or "no module with trained parameters"
            raise UnsupportedError(
                f"training_step of {type(self._module).__name__} calls {names}; call one network, or "
                "self(...) with a forward that calls them all"
            )
        ((self._path, network),) = called.items()
        return network

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Run training_step with `model` (the network or its DDP) substituted for the network."""
        arguments = [batch]
        if is_param_in_hook_signature(self._module.training_step, "batch_idx", min_args=2):
            arguments.append(0)
        with self._in_place(model) as step, self._context():
            found = step(*arguments)
        loss = found.get("loss") if isinstance(found, Mapping) else found
        if not isinstance(loss, torch.Tensor):
            raise FormatError(
                f"training_step of {type(self._module).__name__} returns no loss; return one, or give "
                'hybrid_options={"loss_fn": lambda module, batch: ...}'
            )
        return loss

    @contextmanager
    def _in_place(self, model: nn.Module) -> Iterator[Any]:
        """Yield training_step with `model` substituted for the network."""
        module = self._module
        if self._path == "":  # DDP around the LightningModule itself: its forward runs training_step once
            if model is module:
                yield module.training_step
                return
            yield lambda *args: self._redirected(model, *args)
            return
        parent_path, _, name = self._path.rpartition(".")
        siblings = module.get_submodule(parent_path)._modules
        before = siblings[name]
        siblings[name] = model
        try:
            yield module.training_step
        finally:
            siblings[name] = before

    def _redirected(self, model: nn.Module, *args: Any) -> Any:
        """Call DDP around the LightningModule so that its forward runs training_step."""
        module, before = self._module, self._module.__dict__.get("forward")

        def once(*args: Any) -> Any:
            _set_forward(module, before)
            return module.training_step(*args)

        _set_forward(module, once)
        try:
            return model(*args)
        finally:
            _set_forward(module, before)


def _set_forward(module: nn.Module, forward: Any) -> None:
    """Set a module's own forward; None restores its class's."""
    module.__dict__.pop("forward", None)
    if forward is not None:
        module.__dict__["forward"] = forward


@contextmanager
def _without_logs(module: pl.LightningModule) -> Iterator[None]:
    """Disable training_step's logging, because no training loop is running."""
    names, trainer = ("log", "log_dict"), module._trainer
    loggers = trainer.loggers if trainer is not None else []
    for name in names:
        object.__setattr__(module, name, lambda *_, **__: None)
    if trainer is not None:
        trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        for name in names:
            object.__delattr__(module, name)
        if trainer is not None:
            trainer.loggers = loggers


QSyncStrategy.register_strategies(StrategyRegistry)
