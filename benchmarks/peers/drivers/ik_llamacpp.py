"""Times ik_llama.cpp on a checkpoint, which it gets as llama.cpp does: CHECKPOINT CELLS TYPE, where CELLS is JSON,
[[batch, prompt tokens, decode steps], ...]; then standard input has one of them per line. Runs in llama.cpp's
environment, whose quantizer makes the file; what measures is ``ik_llamacpp.cpp``, compiled against the clone that is
beside that environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.drivers.llamacpp import quantize, write_gguf

CLONE = Path(sys.prefix).parent / "ik_llama.cpp"


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[3]
    file = folder / "model.gguf"
    if not file.exists():
        write_gguf(folder, file)
    program, libraries = CLONE / "build" / "infer-peer", [CLONE / "build" / name for name in ("src", "ggml/src")]
    places = [option for path in libraries for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
    source = Path(__file__).with_suffix(".cpp")
    includes = [f"-I{CLONE / name}" for name in ("include", "ggml/include")]
    command = ["c++", "-O2", "-std=c++17", str(source), *includes, *places, "-lllama", "-lggml", "-o", str(program)]
    subprocess.run(command, check=True)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    run = [str(program), str(quantize(file, kind)), str(vocab), str(os.cpu_count())]
    with subprocess.Popen(run, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        for line in sys.stdin:
            print(*json.loads(line), file=process.stdin, flush=True)


if __name__ == "__main__":
    main()
