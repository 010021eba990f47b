"""What a harvest is made of and read through: files, `datasets`, NumPy, PyTorch, and other tools."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

import patchclamp as pc
from patchclamp.errors import ProgramError
from patchclamp.studies.harvest import Harvested, harvest, recipe

arrow = pytest.importorskip("pyarrow")
datasets = pytest.importorskip("datasets")
torch = pytest.importorskip("torch")
TEXTS = ["The cat sat on the world", "Rome is in Italy", "the dog", "hello, user!"]
SITES = ["resid_post[1]", "mlp_out[0]"]


@pytest.fixture(scope="module")
def lm():
    with pc.LM("fake", prove=False) as lm:
        yield lm


@pytest.fixture(scope="module")
def data(lm, tmp_path_factory) -> Harvested:
    ids = np.random.default_rng(5).integers(2, 60, (20, 13)).tolist()
    return harvest(lm, ids, tmp_path_factory.mktemp("data"), sites=SITES, shard_rows=100, seed=2).open()


@pytest.fixture(scope="module")
def wide(data) -> np.ndarray:
    return np.concatenate(list(data.blocks(site=SITES[0])))


def written(kind: str, folder: Path):
    """The texts in a file or a data set of that kind, and the column that has them."""
    table = {"number": list(range(len(TEXTS))), "text": TEXTS, "body": TEXTS}
    if kind == "text":
        (folder / "a.txt").write_text("\n\n".join(TEXTS) + "\n", encoding="utf-8")
        return folder / "a.txt", None
    if kind == "JSON":
        lines = [json.dumps(dict(zip(table, row, strict=True))) for row in zip(*table.values(), strict=True)]
        (folder / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
        return str(folder / "a.jsonl"), "body"
    if kind == "Parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(arrow.table(table), folder / "a.parquet", row_group_size=3)
        return folder / "a.parquet", None
    made = datasets.Dataset.from_dict(table)
    if kind == "datasets":
        return made, None
    made.save_to_disk(folder / "saved")
    return folder / "saved", "body"


@pytest.mark.parametrize("kind", ["text", "JSON", "Parquet", "datasets", "saved datasets"])
def test_the_same_texts_are_the_same_harvest(lm, tmp_path, kind):
    source, column = written(kind, tmp_path)
    assert list(recipe.documents_of(source, column)) == TEXTS
    plain = harvest(lm, TEXTS, tmp_path / "out", sites=SITES)
    made = harvest(lm, source, tmp_path / "out", sites=SITES, column=column)
    assert made.folder == plain.folder
    assert (plain.ran, made.ran) == (sum(len(lm.tokens(text)) for text in TEXTS), 0)
    with pytest.raises(ProgramError, match=r"column|title"):
        harvest(lm, source, tmp_path / "out", sites=SITES, column="title")


@pytest.mark.parametrize("kind", ["JSON", "Parquet", "datasets", "saved datasets"])
def test_kept_columns_are_in_the_index_of_every_reader(lm, tmp_path, kind):
    source, column = written(kind, tmp_path)
    made = harvest(
        lm, source, tmp_path / "out", sites=SITES, column=column, keep=["number", "body"], shard_rows=7, parts=3
    )
    data, plain = made.open(), harvest(lm, TEXTS, tmp_path / "plain", sites=SITES, shard_rows=7, parts=3).open()
    assert made.folder != str(plain.folder)  # other columns are another data set
    index = data.index().to_pydict()
    assert index["number"] == index["document"] == plain.index().to_pydict()["document"]
    assert index["body"] == [TEXTS[number] for number in index["number"]]
    assert data.index(data.shards[1]).column_names == ["document", "position", "token", "number", "body"]
    batches = list(data.batches(SITES[0], 10, index=True))
    assert torch.cat([batch["number"] for batch in batches]).tolist() == index["number"]
    assert [text for batch in batches for text in batch["body"]] == index["body"]
    assert torch.equal(torch.cat([batch[SITES[0]] for batch in batches]), torch.cat(list(data.batches(SITES[0], 9))))
    rows = data.torch(SITES[1], index=True)
    assert [rows[i]["token"] for i in range(len(rows))] == index["token"]
    loader = torch.utils.data.DataLoader(rows, batch_size=4, num_workers=1)
    assert [text for batch in loader for text in batch["body"]] == index["body"]
    assert [record["body"] for record in data.datasets(SITES[0])] == index["body"]
    frame = data.to_frame(SITES[0])
    assert frame["body"].tolist() == index["body"]
    np.testing.assert_array_equal(np.stack(frame[SITES[0]]), np.concatenate(list(data.blocks(SITES[0]))))
    assert list(data.to_frame().columns) == ["document", "position", "token", "number", "body"]
    again = harvest(
        lm, source, tmp_path / "out", sites=SITES, column=column, keep=["number", "body"], shard_rows=7, parts=3
    )
    assert (again.folder, again.ran) == (made.folder, 0)


def test_a_column_has_one_type_in_all_batches(lm, tmp_path):
    table = {"text": TEXTS, "some": [1, None, 3, 4], "lists": [[1, 2], [3], [4, 5], [6]], "share": [0.5, 1, 2, 3.5]}
    made = harvest(
        lm, datasets.Dataset.from_dict(table), tmp_path, sites=SITES[0], keep=["some", "lists", "share"], parts=2
    )
    index = made.open().index().to_pydict()
    batches = list(made.open().batches(size=3, index=True))
    assert {type(batch["some"]) for batch in batches} == {type(batch["lists"]) for batch in batches} == {list}
    for name in ("some", "lists"):
        assert [value for batch in batches for value in batch[name]] == index[name]
    assert torch.cat([batch["share"] for batch in batches]).tolist() == index["share"]


def test_a_harvest_without_columns_is_named_as_before(lm, tmp_path):
    recipe_now = harvest(lm, TEXTS, tmp_path, sites=SITES).open().manifest.recipe
    fields = {name: getattr(recipe_now, name) for name in recipe_now.__struct_fields__
              if name not in ("columns", "features")}  # fmt: skip
    before = msgspec.json.encode(msgspec.defstruct("Recipe", list(fields))(**fields), order="deterministic")
    assert recipe_now.name == hashlib.sha256(before).hexdigest()[:16]


def test_what_cannot_be_kept_is_refused(lm, tmp_path):
    source, column = written("JSON", tmp_path)
    for documents, keep, path in [(TEXTS, ["label"], "keep"), (source, ["label"], "documents"),
                                  (source, ["token"], "keep"), (source, 5, "keep")]:  # fmt: skip
        with pytest.raises(ProgramError) as caught:
            harvest(
                lm, documents, tmp_path / "out", sites=SITES, keep=keep, column=None if documents is TEXTS else column
            )
        assert caught.value.path == path
    mixed = datasets.Dataset.from_dict({"text": TEXTS}).map(lambda row, i: {"n": i}, with_indices=True)
    with pytest.raises(ProgramError, match="'title'") as caught:
        harvest(lm, mixed, tmp_path / "out", sites=SITES, keep="title")
    assert caught.value.path == "keep"


def test_sites_come_before_sizes(data):
    for reader in (data.blocks, data.batches):
        with pytest.raises(ProgramError, match=r"size=64|site"):
            next(iter(reader(64)))


def test_a_streamed_data_set(lm, tmp_path):
    streamed = datasets.IterableDataset.from_generator(lambda: ({"text": text} for text in TEXTS))
    assert harvest(lm, streamed, tmp_path, sites=SITES).folder == harvest(lm, TEXTS, tmp_path, sites=SITES).folder


def test_token_ids_of_a_column(lm, tmp_path):
    ids = [lm.tokens(text) for text in TEXTS]
    made = harvest(lm, datasets.Dataset.from_dict({"ids": ids}), tmp_path, sites=SITES, column="ids")
    assert made.folder == harvest(lm, TEXTS, tmp_path, sites=SITES).folder


@pytest.mark.parametrize(("name", "content", "text"), [
    ("a.csv", "x", ".txt"), ("a.jsonl", "{}", "line 1: .*'text'"),
    ("a.jsonl", '{"text": "a"}\n\nno', "line 3: "), ("b.txt", None, "b.txt"),
    ("a.jsonl", '{"text": [[1]]}', "documents: "), (".", None, "datasets"),
])  # fmt: skip
def test_files_without_documents_are_refused(tmp_path, name, content, text):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ProgramError, match=text):
        list(recipe.documents_of(tmp_path / name))


# -- readers


def test_numpy_maps_what_is_stored(data, wide):
    raw = np.concatenate([data.array(SITES[0], shard) for shard in data.shards])
    assert raw.dtype == np.uint16
    assert not raw.flags.writeable or raw.base is None
    assert (torch.from_numpy(raw).view(torch.bfloat16).float().numpy() == wide).all()
    assert wide.shape == (260, 16)
    with pytest.raises(pc.UnknownName, match="shard-0000-00009"):
        data.array(SITES[0], "shard-0000-00009")
    with pytest.raises(pc.UnknownName, match="unknown site in this harvest 'embed'"):
        data.array("embed")
    with pytest.raises(pc.ProgramError, match="one of") as raised:
        list(data.blocks())
    assert raised.value.path == "site"


def test_torch_reads_rows_by_number(data, wide):
    rows = data.torch(SITES[0])
    assert len(rows) == 260
    assert rows[0].dtype == torch.bfloat16
    for number in (0, 99, 100, 259, -1):
        assert (rows[number].float().numpy() == wide[number]).all()
    with pytest.raises(IndexError, match="260"):
        rows[260]
    loader = torch.utils.data.DataLoader(data.torch(), batch_size=50, shuffle=True,
                                         generator=torch.Generator().manual_seed(0))  # fmt: skip
    batches = list(loader)
    assert batches[0][SITES[1]].shape == (50, 16)
    read = torch.cat([batch[SITES[0]] for batch in batches]).float().numpy()
    assert sorted(read.tolist()) == sorted(wide.tolist())
    assert (read != wide).any()


def test_torch_reads_batches_from_end_to_end(data, wide):
    batches = list(data.batches(SITES[0], 64))
    assert [len(batch) for batch in batches] == [64] * 4 + [4]
    assert (torch.cat(batches).float().numpy() == wide).all()
    both = next(iter(data.batches(size=10)))
    assert list(both) == SITES
    again = iter(data.batches(SITES[0], 130, repeat=True))
    rounds = [next(again) for _ in range(4)]
    assert torch.equal(rounds[0], rounds[2])
    assert torch.equal(rounds[1], rounds[3])
    loader = torch.utils.data.DataLoader(data.batches(SITES[0], 30), batch_size=None, num_workers=2)
    read = torch.cat(list(loader)).float().numpy()
    assert sorted(read.tolist()) == sorted(wide.tolist())


def test_datasets_reads_records(data, wide):
    records = list(data.datasets(SITES[0], size=33))
    assert [record["document"] for record in records] == data.index()["document"].to_pylist()
    assert [record["token"] for record in records] == data.index()["token"].to_pylist()
    assert (np.array([record[SITES[0]] for record in records], np.float32) == wide).all()
    assert data.datasets().num_shards == len(data.shards) == 3


# -- exporters


def test_saelens_export_is_what_its_loader_checks(data, wide, tmp_path):
    """As SAELens' `load_cached_activation_dataset` does: shape, columns, and blocks as tensors."""
    assert (
        data.to_saelens(tmp_path / "cached", hook_name="blocks.1.hook_resid_post", context_size=16, site=SITES[0]) == 4
    )
    cached = datasets.load_from_disk(tmp_path / "cached")
    assert cached.features["blocks.1.hook_resid_post"].shape == (16, 16)
    cached.set_format("torch", columns=["blocks.1.hook_resid_post", "token_ids"])
    block = cached[2:6]
    assert (block["blocks.1.hook_resid_post"].reshape(-1, 16).numpy() == wide[32:96]).all()
    assert block["token_ids"].reshape(-1).tolist() == data.index()["token"].to_pylist()[32:96]
    with pytest.raises(ProgramError, match=r"context_size: .*260"):
        data.to_saelens(tmp_path / "other", hook_name="x", context_size=300, site=SITES[0])


def test_saelens_loads_it(data, wide, tmp_path):
    store = pytest.importorskip("sae_lens.training.activations_store")
    data.to_saelens(tmp_path / "cached", hook_name="blocks.1.hook_resid_post", context_size=16, site=SITES[0])
    activations = store.ActivationsStore(
        model=None, dataset=None, streaming=False, hook_name="blocks.1.hook_resid_post", hook_head_index=None,
        context_size=16, d_in=16, n_batches_in_buffer=4, total_training_tokens=260, store_batch_size_prompts=4,
        train_batch_size_tokens=32, prepend_bos=False, normalize_activations="none", device=torch.device("cpu"),
        dtype="float32", cached_activations_path=str(tmp_path / "cached"),
    )  # fmt: skip
    rows, ids = activations.get_raw_llm_batch()
    assert (rows.numpy() == wide[:64]).all()
    assert ids.tolist() == data.index()["token"].to_pylist()[:64]


def test_the_buffer_gives_batches_for_ever(data, wide):
    buffer = data.activation_buffer(SITES[0], out_batch_size=100)
    read = torch.cat([next(buffer) for _ in range(5)])
    assert read.dtype == torch.float32
    assert (read.numpy() == np.concatenate([wide, wide])[:500]).all()
    assert [len(batch) for batch in data.activation_buffer(SITES[0], out_batch_size=100, repeat=False)] == [100, 100]
    with pytest.raises(ProgramError, match=r"out_batch_size: .*260"):
        data.activation_buffer(SITES[0], out_batch_size=261)


def test_dictionary_learning_trains_on_it(data, tmp_path):
    training = pytest.importorskip("dictionary_learning.training")
    from dictionary_learning import AutoEncoder
    from dictionary_learning.trainers import StandardTrainer

    trainer = {"trainer": StandardTrainer, "dict_class": AutoEncoder, "activation_dim": 16, "dict_size": 64, "lr": 1e-3,
               "device": "cpu", "steps": 20, "layer": 1, "lm_name": "fake", "warmup_steps": 2, "l1_penalty": 0.1,
               "sparsity_warmup_steps": 4, "submodule_name": SITES[0]}  # fmt: skip
    training.trainSAE(data=data.activation_buffer(SITES[0], out_batch_size=64), trainer_configs=[trainer], steps=20,
                      save_dir=str(tmp_path), device="cpu")  # fmt: skip
    config = json.loads((tmp_path / "trainer_0" / "config.json").read_text())
    assert config["buffer"]["harvest"] == data.folder.name
    assert (tmp_path / "trainer_0" / "ae.pt").exists()
