"""`patchclamp parity` on a small model: both engines loaded, every site of every layer, an edit at each."""

import json

from typer.testing import CliRunner

from patchclamp.cli.study_commands import app

from .conftest import SHALLOW


def test_a_model_means_the_same_on_both_engines(narrowed):
    options = ("enforce_eager=true", "max_model_len=256", "kv_cache_memory_bytes=67108864", "block_size=32")
    given = [word for option in options for word in ("--option", option)]
    done = CliRunner().invoke(app, ["parity", narrowed, *given, "--max-tokens", "2", "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["holds"], told["problems"]) == (0, True, [])
    assert [engine.split()[0] for engine in told["engines"]] == ["vllm", "transformers"]
    assert (told["dtype"], told["prompts"], told["equal_tokens"]) == ("float32", 2, [4, 4])
    sites = {site["name"]: site for site in told["sites"]}
    assert len(sites) == 15
    assert all(len(site["places"]) == (SHALLOW if "[" in site["worst_at"] else 1) for site in sites.values())
    assert all(site["moved"] > 0.1 for site in sites.values())
    assert 0 < max(max(site["places"].values()) for site in sites.values()) <= 1e-4
