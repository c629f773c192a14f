import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_example_of_the_readme_prints_what_it_says(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    promised = re.findall(r"^    # (.*)$", code, re.MULTILINE)[-1]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() == promised


def test_the_links_of_the_readme_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target
