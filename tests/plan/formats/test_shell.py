import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullstride.plan.formats.shell import read_script


def words(text):
    return read_script(text).commands[-1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run a 'b c' \"d e\" f\\ g", ["run", "a", "b c", "d e", "f g"]),
        ("A=3\nrun $A ${A} \"$A\" '$A' pre$A", ["run", "3", "3", "3", "$A", "pre3"]),
        ("run a \\\n  b # c\n", ["run", "a", "b"]),
        ("run a#b", ["run", "a#b"]),
        ("A='x y'\nrun $A \"$A\"", ["run", "x", "y", "x y"]),
        ("A=(x 'y z')\nA+=(w)\nrun ${A[@]} \"${A[@]}\" ${A[1]}", ["run", "x", "y", "z", "w", "x", "y z", "w", "y", "z"]),
        ("A=(\n  x # one\n  y\n)\nrun ${A[@]}", ["run", "x", "y"]),
        ("run ${B:-4} ${B:-$C} ${B-5}", ["run", "4", "$C", "5"]),
        ("N=8\nM=4\nrun $(($N*M)) $((N / 3 + 1))", ["run", "32", "3"]),
        ("export A=1\nexport B\nrun $A", ["run", "1"]),
        ("run $UNSET ${UNSET}", ["run", "$UNSET", "${UNSET}"]),
        ("A=1 B=2 run $A", ["run", "1"]),
        ("A=x; B=$A.y && run $B", ["run", "x.y"]),
        ("cat <<EOF\nrun inside\nEOF\nrun after", ["run", "after"]),
        ('A="one \\\n two"\nrun $A', ["run", "one", "two"]),
    ],
)
def test_words(text, expected):
    assert words(text) == expected


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('[ "$A" == "yes" ]', True),
        ("[[ $A = no ]]", False),
        ('[ -n "$A" ]', True),
        ('[ -z "$UNSET" ]', True),
        ('[ -n "${UNSET}" ]', False),
        ("[ $N -gt 4 ]", True),
        ('[ "$A" != yes ] || [ $N -eq 8 ]', True),
        ('[ "$A" = yes ] && [ $N -lt 8 ]', False),
        ("! [ $A = no ]", True),
    ],
)
def test_branches_that_the_script_decides(condition, holds):
    text = f"A=yes; N=8\nif {condition}; then\n  run left\nelse\n  run right\nfi"
    assert read_script(text).commands == [["run", "left" if holds else "right"]]


def test_elif_and_nesting():
    text = """S=b
if [ $S = a ]; then X=1
elif [ $S = b ]; then
  if [ $S = c ]; then X=3; else X=2; fi
else X=4
fi
run $X"""
    assert words(text) == ["run", "2"]


def test_nothing_is_run_or_substituted():
    assert words("run $(rm -rf x) `date`") == ["run", "$(rm -rf x)", "`date`"]


@given(st.text(alphabet="ab$(){}[]'\"\\`;&|<>#=+ \n", max_size=60))
def test_no_text_brings_it_down(text):
    read_script(text)
