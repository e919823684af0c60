"""What README and docs show is run as it is written, and what they name exists."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import cluster_of, profile_of, sensitivity_of
from two_ranks import start_ranks
from typer.testing import CliRunner

import qsync
from qsync import backend, errors
from qsync.backend import kernel_cache
from qsync.commands import main
from qsync.experiments.workloads.gpt import Gpt

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
README = PAGES["README.md"]
ARCHITECTURE = PAGES["docs/architecture.md"]
COMMANDS = {command.callback.__name__: command.callback for command in main.app.registered_commands}
# In prose these stand for a name that the reader chooses.
PLACEHOLDERS = ("NAME", "QUESTION", "CLASS", "KEY")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


def code(page: str) -> list[str]:
    """Every piece of code on a page: lines of blocks, with continuations joined, and inline code."""
    text = PAGES[page]
    fenced = re.findall(r"```(?:sh|text|python)\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for body in fenced for line in body.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return lines + re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", prose)


@pytest.fixture
def script(tmp_path, monkeypatch) -> Path:
    """README's training script, and a cache of its own for plans; kernels stay where they are compiled."""
    monkeypatch.setenv("QSYNC_CACHE_DIR", str(kernel_cache.folder().parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("QSYNC_PROFILE_S", "0.3")
    path = tmp_path / "train.py"
    path.write_text(next(body for body in blocks("README.md", "python") if body.startswith("# train.py")))
    return path


@pytest.mark.dist
def test_the_training_script_runs(script, tmp_path):
    for code, output in [rank.ended() for rank in start_ranks([script] * 2, tmp_path).values()]:
        assert code == 0, output
    assert list((tmp_path / "cache").glob("qsync/*/plan.json"))


@pytest.mark.dist
@pytest.mark.deep  # it runs above, and an example under torchrun in test_examples.py
def test_the_training_script_runs_across_two_agents(script, tmp_path, monkeypatch):
    """Two torchrun agents on loopback stand for two hosts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun itself sets it for two ranks of one host
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d")
    run = [sys.executable, "-m", "torch.distributed.run"]
    command = [*run, *options, "--rdzv-endpoint", f"127.0.0.1:{port}", str(script)]
    agents = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        errors = [agent.communicate(timeout=240)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(errors)


def test_the_script_is_short():
    script = next(body for body in blocks("README.md", "python") if body.startswith("# train.py"))
    assert (
        sum(
            bool(line.strip()) and not line.startswith(("#", "import", "from"))
            for line in script.splitlines()
        )
        <= 12  # the loader, which hands out shares, among them
    )


def test_the_readme_fits():
    assert len(README.splitlines()) <= 150


def test_the_cluster_file_is_read(tmp_path):
    text = "".join(blocks("docs/guide/clusters.md", "toml"))
    (tmp_path / "cluster.toml").write_text(text)
    cluster = qsync.Cluster.load(tmp_path / "cluster.toml")
    assert cluster.num_ranks == 10
    read = tomllib.loads(text)
    fields = set(read["link"]).union(*read["classes"])
    known = {*qsync.Link.__dataclass_fields__, *qsync.DeviceClass.__dataclass_fields__} - {"emulated_share"}
    assert fields == known
    (what_if,) = blocks("docs/guide/what_if.md", "toml")
    assert tomllib.loads(what_if)["classes"][0]["datasheet"] == "L4"


def options_of(command: str) -> set[str]:
    text = CliRunner(env={"COLUMNS": "400"}).invoke(main.app, [command, "--help"]).output
    return set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", text)) | {"--help"}


def test_every_command_exists_with_its_options():
    assert all(f"qsync {name}" in PAGES["docs/guide/command_line.md"] for name in COMMANDS)
    used: dict[str, set[str]] = {}
    for page in PAGES:
        for line in code(page):
            found = re.match(r"qsync (\w+)\b(.*)", line, flags=re.DOTALL)
            if found:
                options = re.findall(r"(?<![\w-])--[a-z][a-z-]*", found[2])
                used.setdefault(found[1], set()).update(options)
    table = re.findall(
        r"^\| `qsync (\w+)` \|(.*)\|$", PAGES["docs/guide/command_line.md"], flags=re.MULTILINE
    )
    for name, options in table:
        used[name] |= set(re.findall(r"`(--[a-z-]+)", options))
    assert used.keys() <= COMMANDS.keys(), used.keys() - COMMANDS.keys()
    for name, options in used.items():
        if options - {"--json"}:
            assert options <= options_of(name), (name, options - options_of(name))
    assert dict(table).keys() <= COMMANDS.keys()


def test_the_command_line_page_lists_every_option():
    table = dict(
        re.findall(r"^\| `qsync (\w+)` \|(.*)\|$", PAGES["docs/guide/command_line.md"], flags=re.MULTILINE)
    )
    for name in COMMANDS:
        known = {option for option in options_of(name) if option.startswith("--")} - {"--help", "--json"}
        assert known == set(re.findall(r"`(--[a-z-]+)", table.get(name, ""))), name


@pytest.mark.parametrize("page", sorted(PAGES))
def test_experiments_and_targets_exist(page):
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for line in code(page):
        for module, rest in re.findall(r"python -m (qsync\.[\w.]+)(.*)", line):
            if any(word in module for word in PLACEHOLDERS):
                continue
            spec = importlib.util.find_spec(module)
            assert spec is not None and spec.origin, f"{page}: {module}"
            source = Path(spec.origin.replace("__init__.py", "__main__.py")).read_text()
            for option in re.findall(r"--([a-z][a-z-]*)", rest):
                assert f'"--{option}"' in source or f"{option.replace('-', '_')}:" in source, (module, option)
        for target in re.findall(r"^make (?:PYTHON=\S+ )?(\w+)", line):
            assert target in targets, f"{page}: make {target}"


def exists(path: str) -> bool:
    return any(word in path for word in PLACEHOLDERS) or (ROOT / path).exists()


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_path_and_name_exists(page):
    folders = "qsync|backend|predictor|replayer|allocator|experiments|tests|docs|examples"
    wrong = []
    for piece in code(page):
        for path in re.findall(rf"(?<![\w/.~$-])((?:{folders})/[\w./-]*\w/?|(?:{folders})/)", piece):
            wrong += [path] if not exists(path) else []
        if re.fullmatch(r"[a-z_]+\.(py|h|cu)", piece) and piece not in ("train.py",):
            wrong += [piece] if not list(ROOT.glob(f"[!.]*/**/{piece}")) and not exists(piece) else []
        for name in re.findall(r"(?<![\w/.-])qsync((?:\.\w+)+)", piece):
            wrong += [f"qsync{name}"] if not resolves(f"qsync{name}") else []
    assert not wrong, sorted(set(wrong))


def resolves(name: str) -> bool:
    """Whether a dotted name is a module of qsync, or something in one."""
    if any(word in name for word in PLACEHOLDERS):
        return True
    parts = name.split(".")
    found: Any = qsync
    for position, part in enumerate(parts[1:], 2):
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(".".join(parts[:position]))
        except ImportError:
            return False
    return True


@pytest.mark.parametrize("page", sorted(PAGES))
def test_every_link_and_picture_exists(page):
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", PAGES[page]):
        if not target.startswith("http"):
            assert (folder / target).exists(), f"{page}: {target}"


def entries(folder: str) -> set[str]:
    """The modules and packages of a top-level folder, packages with a slash."""
    found = set()
    for entry in (ROOT / folder).iterdir():
        if entry.is_dir() and not entry.is_symlink() and (entry / "__init__.py").is_file():
            found.add(f"{entry.name}/")
        elif entry.suffix == ".py" and (entry.name != "__init__.py" or folder == "qsync"):
            found.add(entry.name)
    return found


def test_the_tree_is_the_tree():
    """The page lists the top-level folders, and every entry of qsync."""
    tree = ARCHITECTURE.partition("<!-- tree:begin -->")[2].partition("<!-- tree:end -->")[0]
    listed = set(re.findall(r"^\| `([^`]+)` \|", tree, flags=re.MULTILINE))
    assert all((ROOT / path).exists() for path in listed), [p for p in listed if not (ROOT / p).exists()]
    found = {path for path in listed if path.count("/") > 1 or not path.endswith("/")}
    assert found == {f"qsync/{entry}" for entry in entries("qsync")}


@pytest.mark.parametrize("folder", ["backend", "predictor", "replayer", "allocator", "experiments"])
def test_the_docstring_of_a_folder_lists_its_entries(folder):
    text = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    listed = {name.rstrip("/") for name in re.findall(r"^`([\w/]+)`", text, flags=re.MULTILINE)}
    assert listed == {name.rstrip("/").removesuffix(".py") for name in entries(folder)}


def test_every_example_is_listed():
    listed = set(re.findall(r"^\| `examples/(\w+\.py)`", ARCHITECTURE, flags=re.MULTILINE))
    assert listed == {path.name for path in (ROOT / "examples").glob("*.py")}


def test_the_layers_are_those_that_are_held():
    text = ARCHITECTURE.partition("<!-- layers:begin -->")[2].partition("<!-- layers:end -->")[0]
    source = ast.parse((ROOT / "tests/test_architecture.py").read_text())
    (layers,) = [
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LAYERS"
    ]
    assert tuple(re.findall(r"`(\w+)`", text)) == layers


def test_the_reference_has_every_public_name():
    api, folders = PAGES["docs/reference/api.md"], PAGES["docs/reference/folders.md"]
    named = re.findall(r"^\.\. auto\w+:: (\S+)", api + folders, flags=re.MULTILINE)
    assert {f"qsync.{name}" for name in qsync.__all__} <= set(named)
    assert {f"qsync.backend.{name}" for name in backend.__all__} <= set(named)
    assert {"qsync.replayer", "qsync.allocator"} <= set(named)
    own = {name for name in vars(errors) if name.endswith("Error")} - {"QSyncError"}
    assert {f"qsync.errors.{name}" for name in own} <= set(named)
    assert all(resolves(name) for name in named)


def test_every_verb_in_python_blocks_is_public():
    for page in PAGES:
        for body in blocks(page, "python"):
            for verb in re.findall(r"(?<![\w.])qsync\.(\w+)\(", body):
                assert verb in qsync.__all__, (page, verb)
            compile(body, page, "exec")


class Encoder(torch.nn.Module):
    """A model with an operator called encoder.layer.0."""

    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16))
        self.encoder = torch.nn.ModuleDict({"layer": layers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder["layer"](x)


def test_the_pieces_work_alone(tmp_path, monkeypatch):
    (text,) = [b for b in blocks("docs/getting_started.md", "python") if "qsync.capture" in b]
    model, batch = Encoder(), torch.randn(4, 16)
    graph = qsync.capture(model, batch)
    profiles = {"train": profile_of(graph, "train"), "infer": profile_of(graph, "infer", slow=2.0)}
    monkeypatch.setattr("qsync.api.profile", lambda *arguments: profiles["train"])
    monkeypatch.setattr("qsync.api.sensitivity", lambda *arguments: sensitivity_of(graph))
    monkeypatch.setattr(qsync.Cluster, "load", lambda path: cluster_of())
    monkeypatch.chdir(tmp_path)
    text = text.replace("encoder.layer.0.*", "encoder.layer.0*")
    names = {
        "model": model, "example_inputs": batch, "example_batch": batch, "other": profiles["infer"],
        "profiles": profiles, "cluster": cluster_of(),
    }  # fmt: skip
    exec(text, names)
    assert qsync.Plan.load(tmp_path / "plan.json").graph_hash == graph.hash
    assert names["model"](batch).shape == (4, 16)


def recipe_block() -> str:
    (text,) = [block for block in blocks("docs/guide/growing.md", "python") if '"my GPT"' in block]
    return text


def test_the_recipe_grows_a_model():
    names: dict[str, Any] = {"qsync": qsync, "MyGPT": lambda *sizes: Gpt(*sizes, context=8, vocab=11)}
    exec(recipe_block(), names)
    assert len(recipe_block().splitlines()) <= 20
    model = Gpt(2, 16, 2, context=8, vocab=11).double()
    big = qsync.expand(model, names["recipe"].to(width=24, layers=3))
    assert qsync.verify_expansion(model, big, torch.arange(16).view(2, 8) % 11).passed


def test_the_derived_recipe_is_the_one_by_hand():
    (text,) = [block for block in blocks("docs/guide/growing.md", "python") if "derive_recipe" in block]
    model, batch = Gpt(2, 16, 2, context=8, vocab=11, tied=True).double(), torch.arange(16).view(2, 8) % 11
    names: dict[str, Any] = {
        "qsync": qsync,
        "MyGPT": lambda *sizes: Gpt(*sizes, context=8, vocab=11, tied=True),
    }
    exec(recipe_block(), names)
    hand = names["recipe"]
    exec(text, names | {"model": model, "batch": batch}, derived := {})
    assert derived["recipe"].lines == hand.lines
    assert (derived["recipe"].sizes, derived["recipe"].follows) == (hand.sizes, hand.follows)
    assert derived["recipe"].read(model)["heads"] == hand.read(model)["heads"] == 2
    big = qsync.expand(model, derived["recipe"].to(width=24, layers=3))
    assert qsync.verify_expansion(model, big, batch).passed


@pytest.mark.slow
def test_growing_runs_from_end_to_end(tmp_path, monkeypatch):
    """With smaller sizes, and without the planning of the last line."""
    from transformers import GPT2Config, GPT2LMHeadModel

    text = blocks("docs/guide/growing.md", "python")[0].replace("width=768, layers=12", "width=48, layers=3")
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=32, n_layer=2, n_head=2))
    tokens = torch.arange(16).view(2, 8) % 11
    batch = {"input_ids": tokens, "labels": tokens}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(**batch).loss.backward()
    optimizer.step()
    ema = {name: value.clone() for name, value in model.state_dict().items()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qsync.hybrid_training.hybrid_job.hybrid", lambda model, batch: model)
    names = {"model": model, "optimizer": optimizer, "ema": ema, "batch": batch}
    exec(text, names)
    assert names["big"].config.n_embd == 48 and (tmp_path / "big").is_dir()


@pytest.mark.slow
def test_the_documentation_builds_without_warnings(tmp_path):
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        "html",
        "-W",
        "--keep-going",
        "-q",
        "docs",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference" / "api.html").is_file()


def test_every_kernel_of_gpus_says_what_it_stands_on():
    from qsync.backend.casts import autotune, epilogues  # noqa: F401  # registers
    from qsync.backend.cutlass.compiled_products import PRODUCTS

    text = PAGES["docs/guide/gpu.md"].partition("## Every kernel")[2]
    assert [name for name in (*PRODUCTS, *autotune.REGISTERED) if f"`{name}`" not in text] == []
