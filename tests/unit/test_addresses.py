"""What a CUDA graph reads is found by path, and what moved since it was recorded is named."""

import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import pytest
import torch

from patchclamp.errors import AddressMoved, EngineError
from patchclamp.runtime.cuda_graphs import addresses, checked, compare


@dataclasses.dataclass
class Metadata:
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    longest: int = 3


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Table(msgspec.Struct):
    rows: torch.Tensor


def made() -> dict:
    """One tensor of each kind, freshly made."""
    metadata = {"layer.0": Metadata(torch.ones(2, 3), torch.ones(2))}
    return {"args": (torch.ones(4), 7, [torch.ones(1)]), "kwargs": {"positions": torch.ones(5), "none": None},
            "attn_metadata": metadata, "slots": Pair(torch.ones(2), torch.ones(3)),
            "patchclamp": Table(torch.ones(6))}  # fmt: skip


def seen(values: dict) -> dict[str, int]:
    return {path: at for name, value in values.items() for path, at in addresses(value, name, "cpu").items()}


PATHS = {
    "args[0]": lambda v: v.update(args=(v["args"][0].clone(), *v["args"][1:])),
    "args[2][0]": lambda v: v["args"][2].__setitem__(0, v["args"][2][0].clone()),
    "kwargs['positions']": lambda v: v["kwargs"].update(positions=v["kwargs"]["positions"].clone()),
    "attn_metadata['layer.0'].block_table": lambda v: setattr(
        v["attn_metadata"]["layer.0"], "block_table", v["attn_metadata"]["layer.0"].block_table.clone()
    ),
    "attn_metadata['layer.0'].seq_lens": lambda v: setattr(
        v["attn_metadata"]["layer.0"], "seq_lens", v["attn_metadata"]["layer.0"].seq_lens.clone()
    ),
    "slots.first": lambda v: v.update(slots=v["slots"]._replace(first=v["slots"].first.clone())),
    "slots.second": lambda v: v.update(slots=v["slots"]._replace(second=v["slots"].second.clone())),
    "patchclamp.rows": lambda v: setattr(v["patchclamp"], "rows", v["patchclamp"].rows.clone()),
}


def test_every_tensor_has_a_path():
    assert seen(made()).keys() == PATHS.keys()
    assert addresses([torch.empty(0), torch.ones(1, device="meta")], "args", "cpu") == {}
    assert addresses(torch.ones(2), "args", "cuda") == {}  # memory that no graph reads


@pytest.mark.parametrize("path", PATHS)
def test_what_is_made_anew_is_named(path):
    values = made()
    then = seen(values)
    compare(then, seen(values), "4 tokens")
    PATHS[path](values)
    with pytest.raises(AddressMoved) as caught:
        compare(then, seen(values), "4 tokens")
    assert str(caught.value).endswith(f" changed: {path}")
    assert isinstance(caught.value, EngineError)


def test_what_is_missing_or_more_is_named():
    then = seen(made())
    values = {name: value for name, value in made().items() if name != "slots"}
    values["kwargs"]["embeds"] = torch.ones(2)
    with pytest.raises(AddressMoved) as caught:
        compare(dict.fromkeys(then, 0), dict.fromkeys(seen(values), 0), "8 tokens")
    told = "missing: slots.first, slots.second; added: kwargs['embeds']"
    assert "the CUDA graph of 8 tokens" in str(caught.value)
    assert str(caught.value).endswith(f" {told}")


def test_it_is_asked_for_in_the_environment(monkeypatch):
    for value, asked in ((None, False), ("", False), ("0", False), ("1", True)):
        monkeypatch.delenv("PATCHCLAMP_CHECK_ADDRESSES", raising=False)
        if value is not None:
            monkeypatch.setenv("PATCHCLAMP_CHECK_ADDRESSES", value)
        assert checked() is asked


class TestWatch:
    """Graphs of vLLM's two kinds, played by objects of the same shape."""

    @pytest.fixture
    def watch(self, monkeypatch):
        module = pytest.importorskip("patchclamp.engines.vllm.compat.variants")
        monkeypatch.setattr(module, "addresses", lambda value, path: addresses(value, path, "cpu"))
        self.own = {"kept": torch.ones(3)}
        return module.Watch(lambda: self.own)

    def test_a_wrapper_is_asked_at_every_replay(self, watch):
        desc, mode = SimpleNamespace(num_tokens=4), SimpleNamespace(name="FULL")
        metadata, args = {"layer": Metadata(torch.ones(2), torch.ones(2))}, (torch.ones(4),)
        context = SimpleNamespace(batch_descriptor=desc, attn_metadata=metadata, slot_mapping=None)
        wrapper = SimpleNamespace(runtime_mode=mode, concrete_cudagraph_entries={}, runnable=lambda hidden_states: None)

        def stock(self, *args, **kwargs):
            if id(desc) not in entries:
                entries[id(desc)] = SimpleNamespace(cudagraph=SimpleNamespace(addresses=watch.current_addresses()))
            return "ran"

        entries: dict = {}
        wrapper.concrete_cudagraph_entries = SimpleNamespace(get=lambda found: entries.get(id(found)))
        for compared in (0, 1, 2):
            assert watch.run_wrapper(stock, wrapper, context, args, {}) == "ran"
            assert watch.compared == compared
        old = metadata["layer"].block_table
        metadata["layer"].block_table = old.clone()
        with pytest.raises(AddressMoved, match=r"4 tokens \(FULL\).* changed: attn_metadata\['layer'\]\.block_table$"):
            watch.run_wrapper(stock, wrapper, context, args, {})
        metadata["layer"].block_table, kept = old, self.own["kept"]
        self.own["kept"] = kept.clone()
        with pytest.raises(AddressMoved, match=r"changed: patchclamp\['kept'\]$"):
            watch.run_wrapper(stock, wrapper, context, args, {})
        self.own["kept"] = kept
        with pytest.raises(AddressMoved, match=r"changed: args\['hidden_states'\]$"):
            watch.run_wrapper(stock, wrapper, context, (args[0].clone(),), {})
        assert watch.run_wrapper(stock, wrapper, context, args, {}) == "ran"

    def test_arguments_have_the_names_of_what_is_called(self, watch):
        names = pytest.importorskip("patchclamp.engines.vllm.compat.variants").argument_names

        class Piece(torch.nn.Module):
            def forward(self, hidden_states, weight):
                return hidden_states * weight

        traced = torch.fx.symbolic_trace(Piece())
        assert names(SimpleNamespace(graph=traced), 2) == ["hidden_states", "weight"]
        assert names(Piece(), 2) == ["hidden_states", "weight"]
        assert names(lambda *args: None, 2) == [0, 1]  # a piece whose graph was not kept
        assert names(SimpleNamespace(graph=traced, forward=None), 3) == ["hidden_states", "weight", 2]

    def test_a_replay_without_arguments_is_asked_what_the_step_built(self, watch):
        batch = SimpleNamespace(input_ids=torch.ones(4), positions=torch.ones(4))
        metadata, desc = {"layer": Metadata(torch.ones(2), torch.ones(2))}, SimpleNamespace(num_tokens=4)

        def prepare_attn(input_batch, cudagraph_mode, block_tables, slot_mappings, for_capture=False):
            return metadata

        state = SimpleNamespace(prepare_attn=prepare_attn)
        manager = SimpleNamespace(graphs={}, run_fullgraph=lambda desc: "ran")
        manager.graphs = SimpleNamespace(get=lambda found: graphs.get(id(found)))
        graphs: dict = {}
        watch.watch_inputs(SimpleNamespace(model_state=state, input_buffers=SimpleNamespace()))
        watch.watch_replays(manager)
        tables = (torch.ones(2, 2),)
        assert state.prepare_attn(batch, "FULL", tables, torch.ones(2)) is metadata
        kept = watch._built["slot_mappings"]
        graphs[id(desc)] = SimpleNamespace(addresses=watch.current_addresses())  # as when the graph is recorded
        assert manager.run_fullgraph(desc) == "ran"
        old = batch.positions
        batch.positions = old.clone()
        state.prepare_attn(batch, "FULL", tables, kept)
        with pytest.raises(AddressMoved, match=r"changed: kwargs\['positions'\]$"):
            manager.run_fullgraph(desc)
        batch.positions = old
        state.prepare_attn(batch, "FULL", (tables[0].clone(),), kept)
        with pytest.raises(AddressMoved, match=r"changed: block_tables\[0\]$"):
            manager.run_fullgraph(desc)
        state.prepare_attn(batch, "FULL", tables, kept)
        assert manager.run_fullgraph(desc) == "ran"
        assert watch.compared == 4
