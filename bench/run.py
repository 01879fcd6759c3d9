"""``make bench``: the package beside what people would use instead, as ratios of one run.

A ratio above 1 says that the package is faster. Both sides do the same work on the same inputs on
one thread, alternating, and the median of several rounds counts. The last column compares results.
"""

import sys

import efficiency
import representations
import torch
import training
from race import Row


def main(wanted: list[str]) -> int:
    """Run every comparison, or those of the parts that are named, and print the table."""
    torch.set_num_threads(1)
    parts = {
        "efficiency": efficiency,
        "representations": representations,
        "training": training,
    }
    unknown = [name for name in wanted if name not in parts]
    if unknown:
        print(f"icmllab: no such part: {unknown[0]}; there are {', '.join(parts)}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    print(f"{'what':<42}{'beside':<28}{'× faster':>9}  agreement")
    for name in wanted or parts:
        for compare in parts[name].COMPARISONS:
            found = compare()
            for row in found if isinstance(found, list) else [found]:
                rows.append(row)
                print(
                    f"{row.what:<42}{row.beside:<28}{row.ratio:>9.2f}  {row.agreement}", flush=True
                )
    slow = [row.what for row in rows if row.ratio < 0.9]
    if slow:
        print(f"slower than 0.9 ×: {', '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
