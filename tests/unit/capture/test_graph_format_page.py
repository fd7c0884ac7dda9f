"""docs/graph-format.md says what the code does. To renew its list of operations, run this file as a script."""

from __future__ import annotations

import json
import re
from pathlib import Path

from roost.capture import graph, graph_format, signatures, sizes
from roost.capture.arguments import DTYPES, MEMORY_FORMATS
from roost.capture.cut import legal_cuts
from roost.capture.graph_format import from_bytes, to_bytes
from roost.capture.ops import ALLOWED_OPS
from roost.checkpoint import tensor_file

PAGE = Path(__file__).parents[3] / "docs" / "graph-format.md"
LIST = re.compile(r"(<!-- operations -->\n)(.*?)(\n<!-- /operations -->)", re.DOTALL)
WIDTH = 150


def page() -> str:
    return PAGE.read_text(encoding="utf-8")


def operations() -> str:
    """Return the list of operations as the page has it: each operation once, with its overloads."""
    overloads: dict[str, list[str]] = {}
    for op in sorted(ALLOWED_OPS):
        name, _, overload = op.rpartition(".")
        overloads.setdefault(name if name != "scalar" else op, []).append(overload if name != "scalar" else "")
    items = [name if kinds == [""] else f"{name}.{'|'.join(kinds)}" for name, kinds in overloads.items()]
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(item) < WIDTH:
            lines[-1] += f" {item}"
        else:
            lines.append(item)
    return "\n```text\n" + "\n".join(lines) + "\n```\n"


def test_the_page_lists_exactly_the_operations_that_nodes_run() -> None:
    match = LIST.search(page())
    assert match is not None
    listed = {
        f"{name}.{overload}" if overload else name
        for item in match[2].replace("```text", "").replace("```", "").split()
        for name, overload in [(item.rpartition(".")[0], kind) for kind in item.rpartition(".")[2].split("|")]
    }
    assert listed == ALLOWED_OPS, "run: python tests/unit/capture/test_graph_format_page.py"


def test_the_example_of_the_page_is_a_graph_that_may_be_cut_where_the_page_says() -> None:
    blocks = re.findall(r"```json\n(.*?)```", page(), re.DOTALL)
    assert len(blocks) == 1
    found = from_bytes(blocks[0].encode())
    assert json.loads(to_bytes(found)) == json.loads(blocks[0])
    assert legal_cuts(found) == (2, 3, 4)


def test_the_page_names_every_dtype_and_memory_format() -> None:
    assert " ".join(DTYPES) in page()
    assert " ".join(MEMORY_FORMATS) in page()


def test_the_limits_of_the_page_are_those_of_the_code() -> None:
    text = page()
    assert f"version {graph.FORMAT_VERSION}\n" in text
    assert (graph_format.MAX_GRAPH_BYTES, tensor_file.MAX_HEADER_BYTES) == (2 << 20, 4 << 20)
    assert "at most 2 MiB, with exactly these fields" in text and "(header: at most 4 MiB)" in text
    for number in (graph.MAX_NODES, graph.MAX_TENSORS, graph.MAX_INPUTS, graph.MAX_VALUES, signatures.MAX_LIST, sizes.MAX_DISTINCT_CALLS):
        assert f"{number:,}" in text
    assert signatures.MAX_INTEGER == signatures.MAX_LITERAL_ELEMENTS == 2**40 and signatures.MAX_WINDOW == 2**20
    assert (graph.MAX_NAME_PARTS, graph.MAX_NAME, graph.MAX_LABEL, graph.MAX_DEPTH) == (32, 512, 200, 4)
    assert (sizes.MAX_RESULT_DIMENSIONS, sizes.TOTAL_FACTOR) == (64, 4)


if __name__ == "__main__":
    PAGE.write_text(LIST.sub(lambda match: match[1] + operations() + match[3], page()), encoding="utf-8")
