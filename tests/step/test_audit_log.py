"""What audits found is told three times of each kind, and counted always."""

from __future__ import annotations

import logging

import pytest

from lightning_dcp.boundaries.findings import Audit, Finding
from lightning_dcp.step.audit_log import TOLD, AuditLog


def audit(level: str, notes: tuple[str, ...] = ()) -> Audit:
    found = Finding(level, "dense", 0, "rank 0 holds 9 dense tokens")  # type: ignore[arg-type]
    return Audit((found, Finding("ok", "distance", 0, "12 hops")), notes)


def test_findings_are_told_a_few_times_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(speaks=True)
    with caplog.at_level(logging.WARNING, "lightning_dcp"):
        for batch in range(TOLD + 2):
            log.take(audit("warn"), batch)
        log.take(None, 9)
        log.take(audit("refuse", ("not replanned: 1 of 2 packs",)), 10)
        log.take(audit("warn", ("replanned, as 1 of 2 packs",)), 11)
    told = [record.getMessage() for record in caplog.records]
    assert len([text for text in told if "warn: rank 0" in text]) == TOLD
    assert told[0] == "boundary audit, batch 0: warn: rank 0 holds 9 dense tokens"
    assert told[TOLD - 1].endswith("(more of this kind are counted, not told)")
    assert "batch 10: refuse" in " ".join(told) and "12 hops" not in " ".join(told)
    assert log.summary == "1 dense (refuse), 6 dense (warn), 1 batches not replanned, 1 batches replanned"


def test_other_ranks_count_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(speaks=False)
    log.take(audit("refuse"), 0)
    assert not caplog.records and log.summary == "1 dense (refuse)"
    assert AuditLog(speaks=True).summary == ""
