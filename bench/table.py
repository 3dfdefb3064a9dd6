# SPDX-License-Identifier: Apache-2.0
"""Turns the JSON lines of ``python -m bench`` into the tables of bench/README.md.

``python -m bench | tee rows.jsonl; python -m bench.table rows.jsonl``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def seconds(row: dict[str, Any]) -> str:
    """Medians, fastest first; in brackets what a row tells of CPU seconds."""
    shown = row.get("seconds") or row.get("growth_mib") or {}
    cpu = row.get("cpu_s_per_gib") or {}
    return ", ".join(
        f"{name} {number(value)}" + (f" ({number(cpu[name])})" if name in cpu else "")
        for name, value in sorted(shown.items(), key=by)
    )


def by(pair: tuple[str, float]) -> float:
    return pair[1]


def main(path: str) -> None:
    rows = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    print(
        "| row | ratio | must reach | | medians (s; memory: MiB; in brackets CPU s/GiB) |\n"
        "|---|---|---|---|---|"
    )
    for row in rows:
        ratios = row["ratios"]
        needs = row["needs"]
        for index, name in enumerate(needs or ratios):
            value = ratios.get(name)
            bound = needs.get(name, "")
            sign, _, limit = bound.partition(" ")
            verdict = ""
            if bound:
                reached = value is not None and (
                    value >= float(limit) if sign == ">=" else value <= float(limit)
                )
                verdict = "reached" if reached else "**not reached**"
            first = index == 0
            print(
                f"| {row['row'] if first else ''} | {name}: {number(value)} | {bound} | {verdict} "
                f"| {seconds(row) if first else ''} |"
            )
    noisy = [f"{row['row']}: {', '.join(row['noisy'])}" for row in rows if row.get("noisy")]
    if noisy:
        print("\nSlowest run over 1.5 x the fastest: " + "; ".join(noisy) + ".")
    if rows:
        print(
            f"\nMachine: {rows[0]['machine']}. Date: {rows[0]['date']}. "
            f"Load average at the start: {rows[0]['load_at_start']}."
        )


if __name__ == "__main__":
    main(sys.argv[1])
