"""``lightning-dcp bench attention``: options, both ways of running ranks, its numbers."""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lightning_dcp.attention.kernels import KERNELS
from lightning_dcp.attention.kernels.cpu_flash import CPUFlashKernel
from lightning_dcp.attention.schemes import SCHEMES
from lightning_dcp.cli import main
from lightning_dcp.commands.bench_attention import options
from lightning_dcp.commands.bench_attention.cases import mixed_lengths, parse_kind, parse_pack
from lightning_dcp.commands.bench_attention.check import Outcome, errors
from lightning_dcp.commands.bench_attention.command import bench_attention
from lightning_dcp.commands.bench_attention.measure import Plan, Row, measure
from lightning_dcp.commands.bench_attention.options import default_sizes, read_sweep
from lightning_dcp.commands.bench_attention.processes import ProcessRanks
from lightning_dcp.commands.bench_attention.timeline import Collective, HopStart, HopWait, RankRecord, end_times
from lightning_dcp.commands.bench_attention.usage import LiveBytes, Usage, peak_memory
from lightning_dcp.commands.bench_attention.work import ONE_RANK, Times
from lightning_dcp.errors import ConfigurationError, DCPError, PeerFailureError, UnsupportedAttentionError
from lightning_dcp.parallel.layout import zigzag
from lightning_dcp.parallel.links import Link
from lightning_dcp.schedule import preset

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
TINY = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "repeats": 2, "device": "cpu"}
LENGTHS = (33, 64, 3)
PACK = ",".join(map(str, LENGTHS))


def sent_bytes(scheme, size, rank, number_bytes=4):
    """What a rank must send forward and backward, by the definition of the scheme."""
    shares = [zigzag(LENGTHS, size).tokens(r) for r in range(size)]
    kv, out = 2 * KV_HEADS * HEAD_DIM, HEADS * HEAD_DIM
    if scheme == "ring":
        # forward each holder's keys go on until they have been everywhere; backward again, and their gradients go home
        passed = sum(shares[(rank - hop) % size] for hop in range(size - 1))
        return number_bytes * kv * (2 * passed + sum(shares))
    if scheme == "all_gather":
        return number_bytes * kv * (2 * (size - 1) * shares[rank] + sum(shares) - shares[rank])
    assert HEADS % size == 0
    group = HEADS // KV_HEADS

    def width(of):  # queries of a rank's heads, and the key heads that they share
        heads = range(of * HEADS // size, (of + 1) * HEADS // size)
        return HEAD_DIM * (len(heads) + 2 * len({head // group for head in heads}))

    others = [r for r in range(size) if r != rank]
    to_heads = sum(shares[rank] * (width(r) + out // size) for r in others)  # q, k, v forward; the gradient backward
    to_tokens = sum(shares[r] * (width(rank) + out // size) for r in others)  # gradients backward; outputs forward
    return number_bytes * (to_heads + to_tokens)


def check_rows(values, sizes):
    rows = values["rows"]
    assert [(row["size"], row["scheme"]) for row in rows] == [(c, s) for c in sizes for s in (ONE_RANK, *SCHEMES)]
    for row in rows:
        c, scheme = row["size"], row["scheme"]
        assert row["kernel"] == "cpu_flash"
        assert row["dtype"] == "float32"
        assert len(row["rounds"]) == 2
        assert min(row["forward_s"], row["backward_s"], row["both_s"], row["share_of_ideal"]) > 0
        for name in ("forward_s", "backward_s", "both_s"):
            assert row[name] == statistics.median(times[name] for times in row["rounds"])
        assert set(row["errors"]) == {"out", "dq", "dk", "dv"}
        assert max(row["errors"].values()) < 1e-4
        if scheme == ONE_RANK:
            assert set(row["sent_bytes"]) == {0}
        else:
            assert row["sent_bytes"] == [sent_bytes(scheme, c, rank) for rank in range(c)]
        tokens = sum(LENGTHS) if scheme == ONE_RANK else min(zigzag(LENGTHS, c).tokens(r) for r in range(c))
        inputs = 4 * tokens * 2 * (HEADS + KV_HEADS) * HEAD_DIM
        assert min(row["peak_bytes"]) > 2 * inputs  # outputs, gradients of all
    for row in rows:
        one = next(other for other in rows if other["scheme"] == ONE_RANK and other["size"] == row["size"])
        if row is not one:
            shares = [
                a["both_s"] / row["size"] / b["both_s"] for a, b in zip(one["rounds"], row["rounds"], strict=True)
            ]
            assert row["shares_of_ideal"] == pytest.approx(shares)
            assert row["share_of_ideal"] == pytest.approx(statistics.median(shares))


# ------------------------------------------------------------------ the command


def test_played_ranks_give_a_table_and_json_with_every_number(tmp_path, capsys):
    path = tmp_path / "attention.json"
    bench_attention([PACK], cp_sizes=[2, 4], ranks="played", check=True, json=str(path), **TINY)
    values = json.loads(path.read_text())
    assert values["ranks"] == "played"
    assert values["communication"] == "modelled"
    assert values["link"] == {"latency": 1.5e-5, "bandwidth": 3.6e11}
    assert values["packs"] == {PACK: list(LENGTHS)}
    check_rows(values, (2, 4))
    printed = capsys.readouterr().out
    for word in (
        "MODELLED",
        "one rank",
        "ring",
        "all_gather",
        "ulysses",
        "ideal",
        "MB",
        "error",
        "cpu_flash",
        "3 sample",
        "picks",
    ):
        assert word in printed


def test_processes_give_a_table_and_json_with_every_number(tmp_path, capsys):
    path = tmp_path / "attention.json"
    kinds = ["causal", "window:4+sinks"]
    bench_attention([PACK], cp_sizes=[2], check=True, kinds=kinds, json=str(path), **TINY)
    values = json.loads(path.read_text())
    assert values["ranks"] == "processes"
    assert values["communication"] == "measured"
    assert values["link"] is None
    assert values["measured_links"]["2"]["bandwidth"] > 0
    check_rows({**values, "rows": [row for row in values["rows"] if row["kind"] == "causal"]}, (2,))
    assert "one thread each" in capsys.readouterr().out


def test_options_may_be_given_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "attention.json"
    words = f"--lengths {PACK} 9 mixed:64 --cp-sizes 2 --schemes ring --ranks played --kinds window:4+sinks --repeats 1"
    small = "--heads=2 --kv-heads=1 --head-dim=4 --device cpu --dtypes float64 --latency 1 --bandwidth 100"
    main(["bench", "attention", *words.split(), *small.split(), "--json", str(path)])
    values = json.loads(path.read_text())
    assert list(values["packs"]) == [PACK, "9", "mixed:64"]
    rings = [row for row in values["rows"] if row["scheme"] == "ring"]
    assert len(rings) == 3
    assert min(row["both_s"] for row in rings) > 4  # four messages of at least one second: they cannot all be hidden
    assert "1e+06 us + bytes / 1e-07 GB/s" in capsys.readouterr().out


def test_every_kind_kernel_and_dtype_is_run_and_what_no_kernel_can_do_is_named(tmp_path, capsys):
    path = tmp_path / "attention.json"
    kinds = ["bidirectional", "window:16", "softcap:5+sinks"]
    bench_attention(
        [PACK],
        cp_sizes=[3],
        ranks="played",
        kinds=kinds,
        kernels=["auto", "cpu_flash", "reference"],
        dtypes=["float64", "bfloat16"],
        schemes=["ring", "ulysses"],
        layout="contiguous",
        check=True,
        json=str(path),
        **TINY,
    )
    values = json.loads(path.read_text())
    found = {(row["kind"], row["kernel"], row["dtype"]) for row in values["rows"]}
    able = {(k, kernel, d) for k in kinds for kernel in ("cpu_flash", "reference") for d in ("float64", "bfloat16")}
    assert found == {key for key in able if key[:2] != ("softcap:5+sinks", "cpu_flash")}
    assert len(values["rows"]) == 3 * len(found)
    assert set(values["refused"]) == {f"softcap:5+sinks, cpu_flash, {d}" for d in ("float64", "bfloat16")}
    assert all("dsinks" in row["errors"] for row in values["rows"] if "sinks" in row["kind"])
    assert "it has no soft-cap" in capsys.readouterr().out


def test_wrong_results_make_the_command_fail(monkeypatch, capsys):
    class Wrong(CPUFlashKernel):
        def backward(self, *args):
            for rows, keys, dq, dk, dv in super().backward(*args):
                yield rows, keys, dq, dk * 1.001, dv

    monkeypatch.setitem(KERNELS, "cpu_flash", Wrong())
    with pytest.raises(DCPError, match=r"differ from the reference kernel[\s\S]*ring, cpu_flash, .* 1\.0e-03"):
        bench_attention([PACK], cp_sizes=[2], ranks="played", check=True, **TINY)
    assert "wrong" in capsys.readouterr().out


def test_all_bad_options_are_refused_at_once(tmp_path):
    with pytest.raises(ConfigurationError) as error:
        bench_attention(
            ["12,x", "mixed:3", "0", "8"],
            cp_sizes=[1, 2],
            schemes=["ring", "star"],
            kernels=["abacus"],
            dtypes=["int8"],
            kinds=["window:0", "sideways", "softcap:-1"],
            heads=6,
            kv_heads=4,
            head_dim=8,
            layout="spiral",
            repeats=0,
            warmup=0,
            latency=-1.0,
            bandwidth=0.0,
            json=str(tmp_path / "nowhere" / "x.json"),
            device="cpu",
        )
    asked = {problem.asked for problem in error.value.problems}
    assert asked == {
        "--lengths 12,x",
        "--lengths mixed:3",
        "--lengths 0",
        "--cp-sizes 1",
        "--schemes star",
        "--kernels abacus",
        "--dtypes int8",
        "--kinds window:0",
        "--kinds sideways",
        "--kinds softcap:-1",
        "--heads 6 --kv-heads 4",
        "--layout spiral",
        "--repeats 0",
        "--warmup 0",
        "--latency -1.0",
        "--bandwidth 0.0",
        f"--json {tmp_path / 'nowhere' / 'x.json'}",
    }


def test_empty_lists_are_refused():
    with pytest.raises(ConfigurationError) as error:
        bench_attention([], cp_sizes=[], schemes=[], kernels=[], dtypes=[], kinds=[], device="cpu")
    assert len(error.value.problems) == 6


def test_a_sweep_that_no_kernel_can_compute_is_refused():
    with pytest.raises(UnsupportedAttentionError, match="no soft-cap"):
        bench_attention([PACK], kinds=["softcap:5"], kernels=["cpu_flash"], **TINY)


# ------------------------------------------------------------------ devices


def sweep(**changed):
    values = dict.fromkeys(("lengths", "cp_sizes", "schemes", "kernels", "dtypes", "kinds"))
    values |= {"heads": (8, 8, 64), "layout": "zigzag", "ranks": "auto", "device": "auto", "others": ()}
    return read_sweep(**(values | changed))


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="no CUDA device"):
        sweep(device="cuda")
    assert sweep().device == "cpu"


def test_one_gpu_plays_the_ranks_and_several_are_used_as_ranks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    chosen = sweep()
    assert (chosen.device, chosen.processes, chosen.dtypes, chosen.sizes) == ("cuda", False, ("bfloat16",), (2, 4, 8))
    with pytest.raises(ConfigurationError, match="--ranks played"):
        sweep(ranks="processes")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert sweep().processes
    assert not sweep(ranks="played").processes


def test_by_default_processes_have_a_core_each_where_there_are_two_or_more(monkeypatch):
    for cores, sizes in ((1, (2,)), (2, (2,)), (7, (2, 4)), (64, (2, 4, 8))):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert default_sizes("cpu", "auto") == sizes
    assert default_sizes("cpu", "played") == (2, 4, 8)
    assert options.SIZES == (2, 4, 8)


def test_on_cuda_the_allocator_tells_the_peak_above_what_was_there_before(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 4500)
    with peak_memory(torch.device("cuda", 0)) as peak:
        calls.append("work")
    assert peak.nbytes == 3500
    assert calls == ["synchronize", "reset", "work", "synchronize"]


# ------------------------------------------------------------------ packs and kinds


def test_a_mixed_pack_has_its_tokens_median_and_longest_and_is_the_same_every_time():
    for tokens in (16384, 16385, 20000, 65536, 131072):
        lengths = mixed_lengths(tokens)
        assert sum(lengths) == tokens
        assert max(lengths) == 8192
        assert statistics.median_low(lengths) <= 512 <= statistics.median_high(lengths)
        assert lengths == mixed_lengths(tokens)
    assert len(mixed_lengths(16384)) > 8


@pytest.mark.parametrize("tokens", [64, 65, 100, 777, 1024, 4096, 9999])
def test_a_small_mixed_pack_is_half_one_sample(tokens):
    lengths = mixed_lengths(tokens)
    assert sum(lengths) == tokens
    assert max(lengths) == tokens // 2
    assert min(lengths) >= 1


def test_packs_and_kinds_are_read_as_written():
    assert parse_pack("8192").lengths == (8192,)
    assert parse_pack("512,512,8192").lengths == (512, 512, 8192)
    assert "3 sample(s), 9,216 tokens: 512, 512, 8192" in str(parse_pack("512,512,8192"))
    assert parse_kind("window:4").mask.window_size == (3, 0)
    assert parse_kind("bidirectional").mask.window_size == (-1, -1)
    assert not parse_kind("bidirectional+window:4").mask.causal
    assert parse_kind("bidirectional+window:4").mask.window_size == (3, 3)
    capped = parse_kind("causal+softcap:2.5+sinks")
    assert (capped.mask.causal, capped.mask.window_size, capped.softcap, capped.sinks) == (True, (-1, -1), 2.5, True)


# ------------------------------------------------------------------ the timeline

LINK = Link(1.0, 10.0)


def ring_record(computes, sent):
    """One hop under the first compute, and a second compute."""
    events = (HopStart(0.0, (0, 1), sent), HopWait(computes[0], (0, 1)))
    return RankRecord(events, sum(computes))


def test_a_hop_hides_behind_compute_as_far_as_it_can():
    assert end_times([ring_record((5.0, 2.0), 20)] * 2, LINK) == [7.0, 7.0]  # 1 + 2 s of transfer under 5 s
    assert end_times([ring_record((1.0, 2.0), 20)] * 2, LINK) == [5.0, 5.0]  # 2 of the 3 s are seen


def test_a_rank_waits_for_the_slower_one_before_it():
    first = ring_record((1.0, 1.0), 0)
    second = RankRecord((HopStart(4.0, (0, 1), 10), HopWait(5.0, (0, 1))), 6.0)
    assert end_times([first, second], LINK) == [7.0, 6.0]  # sent at 4, there at 4 + 1 + 1, and 1 s of compute


def test_two_hops_share_a_link_and_nothing_is_sent_for_nothing():
    both = RankRecord((HopStart(0.0, (0, 1), 20), HopStart(0.0, (1, 1), 10), HopWait(0.0, (1, 1))), 0.0)
    assert end_times([both] * 2, LINK) == [4.0, 4.0]
    assert end_times([ring_record((0.0, 1.0), 0)] * 2, LINK) == [1.0, 1.0]


def test_a_collective_begins_with_the_last_rank_and_takes_as_long_as_the_most_bytes():
    records = [
        RankRecord((Collective(1.0, 10), Collective(2.0, 0)), 3.0),
        RankRecord((Collective(4.0, 30), Collective(4.0, 10)), 5.0),
    ]
    # at 4 + 1 + 3 the first is over; then 1 and 0 s of compute, 1 + 1 s, and 1 s each
    assert end_times(records, LINK) == [12.0, 12.0]


def test_ranks_may_begin_at_different_times():
    assert end_times([ring_record((5.0, 2.0), 20)] * 2, LINK, [0.0, 3.0]) == [8.0, 10.0]


def test_a_record_that_cannot_have_happened_is_refused():
    with pytest.raises(RuntimeError, match="no other rank sends"):
        end_times([RankRecord((HopWait(0.0, (0, 1)),), 0.0)], LINK)


# ------------------------------------------------------------------ memory and errors


def test_live_bytes_are_those_of_tensors_that_are_not_freed():
    before = torch.zeros(100)
    with LiveBytes() as live:
        a = torch.zeros(1000)
        b = a * 2
        view = b[:10]
        del a
        c = torch.zeros(500)
        c += 1
        before += 1
        assert live.peak == 8000  # a and b
        d = torch.zeros(1000)
        assert live.peak == 10000  # b, c and d
        del b, d
        e = torch.zeros(500)
        assert live.peak == 10000
        del view
        f = torch.zeros(1500)
        assert live.peak == 10000
        g = torch.zeros(250)
    assert live.peak == 4 * (len(c) + len(e) + len(f) + len(g)) == 11000


def test_errors_are_seen_where_numbers_are_small():
    index = torch.arange(256)
    wanted = torch.ones(256, 1, 2, dtype=torch.float64)
    wanted[128:] = 0.01  # late tokens
    found = wanted.clone()
    found[192:] *= 1.5
    tensors = Outcome({"out": wanted}, None)
    assert errors(Outcome({"out": wanted}, None), tensors, index) == {"out": 0.0}
    assert errors(Outcome({"out": found}, None), tensors, index)["out"] == pytest.approx(0.5)
    found[0] = math.nan
    assert math.isnan(errors(Outcome({"out": found}, None), tensors, index)["out"])
    assert errors(Outcome({"out": found[:0]}, None), tensors, index[:0]) == {"out": 0.0}


def test_results_that_are_no_numbers_are_wrong():
    setting = sweep(lengths=["8"], device="cpu").settings(2)[0][0]
    row = Row(setting, "ring", (Times(1, 1, 2),), (1.0,), (Usage(1, 1),), {"out": 0.0, "dq": math.nan})
    assert row.is_wrong
    assert not Row(setting, "ring", (Times(1, 1, 2),), (1.0,), (Usage(1, 1),), {"out": 1e-6}).is_wrong
    assert not Row(setting, "ring", (Times(1, 1, 2),), (1.0,), (Usage(1, 1),), None).is_wrong


# ------------------------------------------------------------------ measuring


class FakeRanks:
    """Two ranks; every second round the machine is ten times slower."""

    size = 2

    def __init__(self):
        self.orders = []

    def prepare(self, setting):
        pass

    def round(self, order):
        self.orders.append(tuple(order))
        slow = 10.0 if len(self.orders) % 2 else 1.0
        seconds = {ONE_RANK: (8.0, 10.0), "ring": (5.0, 6.0), "ulysses": (9.0, 4.0)}
        return {name: [Times(slow * s, slow * s, 2 * slow * s) for s in seconds[name]] for name in order}

    def usage(self, scheme):
        return [Usage(1, 10), Usage(2, 9)]

    def check(self, scheme):
        raise AssertionError("not asked for")


def test_shares_are_ratios_inside_a_round_in_an_order_that_changes():
    ranks, setting = FakeRanks(), sweep(lengths=["8"], device="cpu").settings(2)[0][0]
    plan, done = Plan(("ring", "ulysses"), repeats=3, warmup=2, check=False, cost=preset("cpu")), []
    rows = {row.scheme: row for row in measure(ranks, Link(1e-5, 1e9), setting, plan, done.append)}
    assert len(ranks.orders) == 4  # one round more than are timed; the first run of each is the watched one
    assert sum(done) == plan.runs
    assert len({order[0] for order in ranks.orders[1:]}) == 3
    assert rows["ring"].shares == pytest.approx([18 / 2 / 12] * 3)
    assert rows["ulysses"].shares == pytest.approx([18 / 2 / 18] * 3)
    assert rows[ONE_RANK].times == Times(9.0, 9.0, 18.0)  # rounds 2 to 4: fast, slow, fast
    assert (rows["ring"].sent_bytes, rows["ring"].peak_bytes) == (2, 10)
    assert [name for name, row in rows.items() if row.is_picked] == ["ring"]
    assert rows[ONE_RANK].estimate_s is None
    assert 0 < rows["ring"].estimate_s <= 1.05 * rows["ulysses"].estimate_s


# ------------------------------------------------------------------ processes


def alive(pid):
    return fields(pid)[:1] not in ([], ["Z"])


def fields(pid):
    """What the kernel tells of a process from its state on; nothing if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def session(leader):
    """The living processes of a session."""
    pids = [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if alive(pid) and fields(pid)[3:4] == [str(leader)]]


def test_a_rank_that_fails_is_named_and_no_process_is_left():
    broken = sweep(lengths=["8"], device="cpu", heads=(2, 2, 4)).settings(2)[0][0]
    object.__setattr__(broken, "dtype", "float99")
    with pytest.raises(PeerFailureError, match=r"rank \d of 2 failed:[\s\S]*float99"), ProcessRanks(2, "cpu") as ranks:
        workers = [worker for worker, _ in ranks._workers]
        pids = [worker.pid for worker in workers]
        ranks.prepare(broken)
    assert not any(map(alive, pids))


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_no_process_outlives_the_command(how):
    words = ["bench", "attention", "--lengths", "8192", "--cp-sizes", "2", "--repeats", "1000", "--device", "cpu"]
    command = subprocess.Popen(
        [sys.executable, "-m", "lightning_dcp", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline, begun = time.monotonic() + 150, []
    while len(begun) < 4 and time.monotonic() < deadline and command.poll() is None:
        begun = session(command.pid)  # the command, what starts its ranks, and two ranks
        time.sleep(0.2)
    assert len(begun) >= 4
    if how is signal.SIGINT:
        os.killpg(command.pid, how)  # as a terminal does
    else:
        command.send_signal(how)
    command.wait(120)
    while session(command.pid) and time.monotonic() < deadline + 30:
        time.sleep(0.2)
    assert not session(command.pid)


@pytest.mark.parametrize(("lengths", "kind"), [("1", "causal"), ("64", "window:1"), ("1,1,9", "bidirectional")])
def test_gradients_that_are_nothing_but_rounding_are_not_wrong(lengths, kind):
    bench_attention([lengths], cp_sizes=[2], ranks="played", check=True, kinds=[kind], dtypes=["float32"], heads=8,
                    kv_heads=8, head_dim=64, device="cpu", repeats=1)  # fmt: skip


def test_a_wrong_cost_model_is_named_with_all_other_problems():
    with pytest.raises(ConfigurationError) as caught:
        bench_attention([PACK], repeats=0, cost_model="nope", device="cpu")
    assert len(caught.value.problems) == 2
