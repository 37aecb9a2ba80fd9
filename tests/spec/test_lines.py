"""The line of every key is found in whatever TOML allows."""

import random
import tomllib

from phalanx.spec.draft import key_lines


def test_lines_of_keys() -> None:
    text = '''# comment [x] = "y"
top = """
a = 1
[no] ""\\""""
"quoted key".'b' = 'x # y'

[ train . "steps" ]  # header
inline = { a = 1, b.c = [ "]", '}' ], d = { e = 2020-01-01 10:00:00 } }
array = [ # [
  1, { x = "," },
  \'\'\'
  z = 1\'\'\'',
]
after = 1e3
[[many]]
x = 1
[[many]]
x = 2
[deep.er]
[data.mix.wiki]
weight = 1
[data.mix.my-code]
weight = 2
'''
    tomllib.loads(text)  # `key_lines` promises nothing else
    assert key_lines(text) == {
        ("top",): 2,
        ("quoted key",): 5,
        ("quoted key", "b"): 5,
        ("train",): 7,
        ("train", "steps"): 7,
        ("train", "steps", "inline"): 8,
        ("train", "steps", "inline", "a"): 8,
        ("train", "steps", "inline", "b"): 8,
        ("train", "steps", "inline", "b", "c"): 8,
        ("train", "steps", "inline", "d"): 8,
        ("train", "steps", "inline", "d", "e"): 8,
        ("train", "steps", "array"): 9,
        ("train", "steps", "after"): 14,
        ("many",): 15,
        ("many", "x"): 16,
        ("deep",): 19,
        ("deep", "er"): 19,
        ("data",): 20,
        ("data", "mix"): 20,
        ("data", "mix", "wiki"): 20,
        ("data", "mix", "wiki", "weight"): 21,
        ("data", "mix", "my-code"): 22,
        ("data", "mix", "my-code", "weight"): 23,
    }


def test_lines_of_random_texts() -> None:
    """Every value is its own line number in what is generated, so tomllib itself says where each key stands."""
    draw = random.Random(0)
    for _ in range(300):
        lines: list[str] = []
        for table in range(draw.randrange(1, 4)):
            lines += [draw.choice(["", "# [x]", "  "]) for _ in range(draw.randrange(3))]
            lines.append(draw.choice([f"[t{table}]", f"[ t{table} . 'a b' ] # ]", f'["t{table}".x.y]']))
            for key in range(draw.randrange(4)):
                filler = draw.choice(
                    ["f{} = '''\n[t]\nk = 1'''", 'f{} = """\\"""\n\n"""', "f{} = [\n'#', [ ']' ],\n1,]", "f{}.g = 1.5"]
                )
                lines += filler.format(key).split("\n")
                number = len(lines) + 1
                lines.append(
                    draw.choice(["k{} = {}", "'k{}'.a.b = {} # c", "k{} = {{ x = {}, y.z = {} }}"]).format(key, number, number)
                )
        text = "\n".join(lines)
        found = key_lines(text)
        for path, value in leaves(tomllib.loads(text), ()):
            if type(value) is int and path[-1] != "g":
                assert found[path] == value


def leaves(tree: dict, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], object]]:
    if not isinstance(tree, dict):
        return [(path, tree)]
    return [leaf for name, value in tree.items() for leaf in leaves(value, (*path, name))]
