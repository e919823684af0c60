"""Train in a loop of Accelerate's, on two ranks of which one is weak.

`accelerator.prepare` takes what `qsync.hybrid` returns as it takes any model, and leaves each rank its share
of the batch. Accelerate accumulates and clips the gradients, and saves and loads the state. Run it with
`OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/accelerate_loop.py`.
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import qsync

EPOCHS, BATCH = 12, 128  # samples of a step, on both ranks


def main() -> None:
    """Train and save, train on, then go back; print the accuracy on digits that were held out."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float(), torch.tensor(digits.target)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 10))
    data = TensorDataset(images[:1500], labels[:1500])
    loader = DataLoader(data, batch_sampler=qsync.ShareSampler(data, batch_size=BATCH))
    # Rank 1 emulates a weak device: it gets half a core.
    share = 0.5 if accelerator.process_index == 1 else None
    loss_fn = lambda m, b: cross_entropy(m(b[0]), b[1])  # noqa: E731
    model = qsync.hybrid(model, loader=loader, loss_fn=loss_fn, emulated_share=share)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def accuracy_after(epochs: int) -> str:
        for chosen, targets in (batch for _ in range(epochs) for batch in loader):
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(chosen), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            return f"{(model(images[1500:]).argmax(1) == labels[1500:]).float().mean():.1%}"

    with tempfile.TemporaryDirectory() as own:
        folder = broadcast_object_list([own])[0]  # that of rank 0, on every rank
        accelerator.print(f"held-out accuracy after {EPOCHS} epochs: {accuracy_after(EPOCHS)}")
        accelerator.save_state(folder)
        accelerator.print(f"an epoch later: {accuracy_after(1)}")
        accelerator.load_state(folder)
        accelerator.print(f"from the saved state: {accuracy_after(0)}")
        accelerator.wait_for_everyone()  # rank 0 removes the folder


if __name__ == "__main__":
    main()
