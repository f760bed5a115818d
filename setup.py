"""The rest is in pyproject.toml. Here: flash_fwd.cu, flash_bwd.cu, flash_mask.cu and stages/ go into the
wheel, as data of the package, under flash_ladder/sources/. In the tree they stay where they are."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TREE = Path(__file__).resolve().parent
SOURCES = ("flash_fwd.cu", "flash_bwd.cu", "flash_mask.cu", "stages/*.cuh", "stages/*/*.cuh")


class BuildWithSources(build_py):
    def run(self):
        if not self.editable_mode:  # which takes them from the tree
            shutil.rmtree(self.build_lib, ignore_errors=True)  # an earlier build's: a stage may be gone
        super().run()
        if not self.editable_mode:
            for source, target in self.copied().items():
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)

    def copied(self) -> dict[str, str]:
        """Where each source file goes."""
        folder = Path(self.build_lib, "flash_ladder", "sources")
        files = [file for pattern in SOURCES for file in TREE.glob(pattern)]
        return {str(file): str(folder / file.relative_to(TREE)) for file in files}

    def get_outputs(self, include_bytecode=1):
        return [*super().get_outputs(include_bytecode), *self.copied().values()]


setup(cmdclass={"build_py": BuildWithSources})
