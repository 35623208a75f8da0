"""The command that runs Colossal-AI's own tests: what it refuses. What the tests say is in results/upstream_tests."""

import subprocess

import pytest

import fork_ranks


@pytest.fixture
def checkout(tmp_path):
    """A git repository that looks like one of Colossal-AI's."""
    (tmp_path / "tests/test_legacy").mkdir(parents=True)
    (tmp_path / "version.txt").write_text("0.5.0\n")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    return tmp_path


def refusal(checkout):
    result = fork_ranks.run("tools/parity/upstream_tests.py", [str(checkout)])
    assert result.codes == [2], result
    (line,) = result.stderr[0].splitlines()
    return line


def test_a_folder_that_is_no_checkout_is_refused(tmp_path):
    assert (
        refusal(tmp_path) == f"error: {tmp_path} is no git checkout of Colossal-AI with tests/test_legacy; see --help"
    )


def test_a_checkout_of_another_version_is_refused(checkout):
    (checkout / "version.txt").write_text("0.4.9\n")
    assert refusal(checkout).endswith("has version 0.4.9, but 0.5.0 is installed: git checkout v0.5.0")


def test_changed_tests_are_refused(checkout):
    (checkout / "tests/test_legacy/test_new.py").write_text("")
    assert refusal(checkout).endswith("tests differs from its commit: git checkout tests")
