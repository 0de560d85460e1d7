"""A results page: sections of Markdown between two markers, each replaced when its task is measured again."""

from __future__ import annotations

from pathlib import Path

BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"
HEADING = "### "


class Page:
    """A Markdown file with our sections between two markers; nothing else in it is ours."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._before, self._preamble, self._after = "# How fast it is\n\n", "", "\n"
        self._sections: dict[str, str] = {}  # by heading
        self._read()

    def _read(self) -> None:
        if not self.path.exists():
            return
        text = self.path.read_text("utf-8")
        if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
            raise SystemExit(f"--write {self.path}: it needs the line {BEGIN} and after it {END}, once each")
        self._before, rest = text.split(BEGIN)
        block, self._after = rest.split(END)
        preamble, *sections = f"\n{block.strip()}\n".split(f"\n{HEADING}")
        self._preamble = preamble.strip()
        self._sections = {section.partition("\n")[0]: section.partition("\n")[2].strip() for section in sections}

    def put(self, section: str) -> None:
        """It takes the place of the one with the same heading, or the last; all others stay."""
        self._read()  # measuring takes long, and others write here too
        heading, _, text = section.partition("\n")
        self._sections[heading.lstrip("# ")] = text.strip()
        parts = [self._preamble] if self._preamble else []
        parts += [f"{HEADING}{heading}\n\n{text}" for heading, text in self._sections.items()]
        block = "\n\n".join(parts)
        temporary = self.path.with_name(self.path.name + ".new")
        temporary.write_text(f"{self._before}{BEGIN}\n{block}\n{END}{self._after}", "utf-8")
        temporary.replace(self.path)
