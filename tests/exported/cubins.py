"""Cubins in a kernel library, and what nvdisasm and their own headers say of them."""

import importlib.metadata
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EM_CUDA = 190
SHT_NOBITS = 8


@dataclass(frozen=True)
class Cubin:
    image: bytes

    def _sections(self) -> Iterator[tuple[str, bytes]]:
        """Name and content of each section."""
        (offset,) = struct.unpack_from("<Q", self.image, 40)
        count, names_index = struct.unpack_from("<HH", self.image, 60)
        headers = [
            struct.unpack_from("<IIQQQQII", self.image, offset + 64 * k) for k in range(count)
        ]
        names = headers[names_index][4]
        for name, kind, _, _, start, size, _, _ in headers:
            at = names + name
            text = self.image[at : self.image.index(b"\0", at)].decode()
            yield text, b"" if kind == SHT_NOBITS else self.image[start : start + size]

    @property
    def kernels(self) -> list[str]:
        return [name[6:] for name, _ in self._sections() if name.startswith(".text.")]

    def _attributes(self, *numbers: int) -> list[int]:
        """Values of attributes of .nv.info that belong to a function (EIATTR_*)."""
        found = []
        for name, content in self._sections():
            if name != ".nv.info":
                continue
            at = 0
            while at + 4 <= len(content):
                form, attribute, size = struct.unpack_from("<BBH", content, at)
                if form == 4 and attribute in numbers:
                    found.append(struct.unpack_from("<I", content, at + 8)[0])
                at += 4 + (size if form == 4 else 0)
        return found

    @property
    def registers(self) -> int:
        """Registers of a thread (EIATTR_REGCOUNT); the most of all kernels."""
        return max(self._attributes(0x2F))

    @property
    def stack_bytes(self) -> int:
        """Local memory of a thread (EIATTR_FRAME_SIZE, EIATTR_MIN_STACK_SIZE)."""
        return max(self._attributes(0x11, 0x12))


def cubins(library: Path) -> list[Cubin]:
    """The cubins that a library embeds, in the order of the objects that it was linked from."""
    content = library.read_bytes()
    found = []
    at = 0
    while (at := content.find(b"\x7fELF", at)) >= 0:
        if struct.unpack_from("<H", content, at + 18)[0] == EM_CUDA:
            segments, sections = struct.unpack_from("<QQ", content, at + 32)
            (segment_count,) = struct.unpack_from("<H", content, at + 56)
            (section_count,) = struct.unpack_from("<H", content, at + 60)
            end = max(segments + 56 * segment_count, sections + 64 * section_count)
            for k in range(section_count):
                header = struct.unpack_from("<IIQQQQ", content, at + sections + 64 * k)
                if header[1] != SHT_NOBITS:
                    end = max(end, header[4] + header[5])
            found.append(Cubin(content[at : at + end]))
        at += 4
    return found


def nvdisasm() -> Path:
    files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    return next(Path(str(f.locate())) for f in files if f.name == "nvdisasm")


@dataclass(frozen=True)
class Sass:
    target: str
    opcodes: Counter[str]
    """How often each opcode occurs, its modifiers included: "UTCHMMA.2CTA"."""

    def count(self, opcode: str) -> int:
        """Occurrences of an opcode with whatever modifiers."""
        return sum(n for name, n in self.opcodes.items() if name.split(".")[0] == opcode)


def disassemble(cubin: Cubin, folder: Path) -> Sass:
    path = folder / "kernel.cubin"
    path.write_bytes(cubin.image)
    text = subprocess.run(
        [nvdisasm(), "-c", "-ndf", path], check=True, capture_output=True, text=True
    ).stdout
    target = re.search(r"^\s*\.target\s+(\S+)", text, re.M)
    assert target is not None
    lines = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text, re.M)
    assert lines, "no instruction was read"
    return Sass(target[1], Counter(lines))
