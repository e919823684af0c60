"""qsync in the training loops of other libraries: a thin adapter for each.

`transformers` `QSyncTrainer`, and a mixin for other trainers `lightning` `QSyncStrategy` `hugging_face` a
model from its configuration, with random weights `trainer_plans` shared checks of options and checkpoints
`supported_versions` tested versions of these libraries

Accelerate needs none: `accelerator.prepare(qsync.hybrid(model, ...))`. Nor do FSDP2, peft and
torch.distributed.checkpoint: see docs/guide/frameworks.md.
"""
