"""The tasks of recall and of state tracking, against plain Python written from their papers' definitions."""

import itertools
import math
import re

import pytest
import torch
from test_tasks import name, rows

from seqmix.tasks.assoc_recall import AssocRecall
from seqmix.tasks.base import IGNORE
from seqmix.tasks.copy_ar import CopyAR
from seqmix.tasks.induction_heads import InductionHeads
from seqmix.tasks.modular_arithmetic import ModularArithmetic
from seqmix.tasks.mqar import MQAR
from seqmix.tasks.parity import Parity
from seqmix.tasks.word_problem import GROUPS, WordProblem, multiplication


def scored(targets):
    return {at: target for at, target in enumerate(targets) if target != IGNORE}


def chi_squared(values, n):
    """Of counts of 0..n-1 that should be equal; its mean is n - 1 and its variance 2 (n - 1)."""
    counts = torch.as_tensor(values).bincount(minlength=n).double()
    assert len(counts) == n
    expected = counts.sum() / n
    return ((counts - expected) ** 2 / expected).sum()


def likely(values, n):
    """Whether equal counts of 0..n-1 would be so uneven more often than once in a million."""
    return chi_squared(values, n) < n - 1 + 5 * math.sqrt(2 * (n - 1)) + 14


@pytest.mark.parametrize("task", [InductionHeads(), InductionHeads(4, 3)], ids=name)
def test_induction_heads_asks_for_what_followed_the_trigger(task):
    places, answers = [], []
    for inputs, targets in rows(task, n=4000 if task.seq_len < 10 else 1000):
        trigger = task.n_symbols
        first, last = (at for at, x in enumerate(inputs) if x == trigger)
        assert last == task.seq_len - 1 and scored(targets) == {last: inputs[first + 1]}
        places.append(first)
        answers.append(inputs[first + 1])
    assert likely(places, task.seq_len - 2) and likely(answers, task.n_symbols)
    assert InductionHeads().vocab_size == 16


@pytest.mark.parametrize("task", [AssocRecall(), AssocRecall(3, 5, 7)], ids=name)
def test_assoc_recall_asks_for_the_value_of_a_key_that_was_told(task):
    answers, keys = [], []
    for inputs, targets in rows(task, n=2000):
        *told, query = inputs
        pairs = [*zip(told[::2], told[1::2], strict=True)]
        assert all(k < task.n_keys <= v < task.vocab_size for k, v in pairs)
        assert len({k for k, _ in pairs}) == len({*pairs}), "a key has one value in a row"
        assert scored(targets) == {task.seq_len - 1: dict(pairs)[query]}
        answers.append(targets[-1] - task.n_keys)
        keys += told[::2]
    assert likely(answers, task.n_values) and likely(keys, task.n_keys)
    assert AssocRecall().vocab_size == 20 and AssocRecall().seq_len == 2 * 20 + 1


@pytest.mark.parametrize("task", [MQAR(), MQAR(16, 2, 16, filler="zero"), MQAR(12, 3, 12)], ids=name)
def test_mqar_asks_for_every_key_once_at_an_even_distance(task):
    n, half = task.n_pairs, task.vocab_size // 2
    for inputs, targets in rows(task, n=200):
        keys, values = inputs[: 2 * n : 2], inputs[1 : 2 * n : 2]
        assert len({*keys}) == len({*values}) == n
        assert all(1 <= k < half <= v < task.vocab_size for k, v in zip(keys, values, strict=True))
        answers = scored(targets)
        assert sorted(inputs[at] for at in answers) == sorted(keys) and all(at >= 2 * n and at % 2 == 0 for at in answers)
        assert all(dict(zip(keys, values, strict=True))[inputs[at]] == value for at, value in answers.items())
        if task.filler == "zero":
            assert {x for at, x in enumerate(inputs[2 * n :], 2 * n) if at not in answers} == {0}


@pytest.mark.parametrize("alpha", [0.01, 1.0])
def test_the_gaps_of_mqar_follow_the_power_law(alpha):
    """The first gap drawn has P(g) ~ (g + 1)^(alpha - 1); the second the same among those that are left."""
    task = MQAR(64, 2, 24, alpha=alpha)
    gaps = task._gaps(task.row_keys("train", torch.arange(40000)))
    p = torch.arange(1, 11).double() ** (alpha - 1)
    p /= p.sum()
    both = p[:, None] * p / (1 - p[:, None])
    both.fill_diagonal_(0)
    counts = (gaps[:, 0] * 10 + gaps[:, 1]).bincount(minlength=100).view(10, 10).double()
    assert (counts.diagonal() == 0).all()
    off = ~torch.eye(10, dtype=torch.bool)
    expected = 40000 * both[off]
    assert ((counts[off] - expected) ** 2 / expected).sum() < 89 + 5 * math.sqrt(2 * 89) + 14


@pytest.mark.parametrize("task", [Parity(), Parity(5, 5), Parity(1, 9, score="every")], ids=name)
def test_parity_counts_the_ones(task):
    lengths, answers = [], []
    for inputs, targets in rows(task, n=2000):
        text = task.decode(inputs)
        bits = text.rstrip("·")
        assert task.min_len <= len(bits) and "·" not in bits
        parities = {at: bits[: at + 1].count("1") % 2 for at in range(len(bits))}
        last = len(bits) - 1
        assert scored(targets) == (parities if task.score == "every" else {last: parities[last]})
        lengths.append(len(bits) - task.min_len)
        answers.append(parities[last])
    assert likely(lengths, task.seq_len - task.min_len + 1) and likely(answers, 2)
    assert (Parity().min_len, Parity().seq_len) == (3, 40), "Grazzi et al. 2024"


@pytest.mark.parametrize("task", [ModularArithmetic(), ModularArithmetic(3, 2, 8)], ids=name)
def test_modular_arithmetic_is_pythons(task):
    lengths, answers = [], []
    for inputs, targets in rows(task, n=3000):
        expression = task.decode(inputs).rstrip("·")
        assert re.fullmatch(r"\d([-+*]\d)*=", expression)
        value = eval(expression[:-1]) % task.modulus
        assert scored(targets) == {len(expression) - 1: value}
        lengths.append((len(expression) - task.min_len) // 2)
        answers.append(value)
    assert likely(lengths, (task.seq_len - task.min_len) // 2 + 1)
    p = task.chance_token_accuracy
    assert abs(answers.count(0) / 3000 - p) < 5 * math.sqrt(p * (1 - p) / 3000)


@pytest.mark.parametrize("group", GROUPS)
def test_word_problem_multiplies_all_elements_so_far(group):
    task = WordProblem(11, group=group)
    table = multiplication(group, torch.device("cpu")).tolist()
    for inputs, targets in rows(task, n=20):
        assert targets == [*itertools.accumulate(inputs, lambda a, b: table[a][b])]
    n = len(table)
    assert n == task.vocab_size == {"s5": math.factorial(5), "a5": math.factorial(5) // 2, "z60": 60}[group]
    assert table[0] == [row[0] for row in table] == [*range(n)], "0 is the identity"
    assert all(sorted(line) == [*range(n)] for line in (*table, *zip(*table, strict=True))), "every element has an inverse"
    some = range(0, n, 7)
    assert all(table[table[a][b]][c] == table[a][table[b][c]] for a in some for b in some for c in some)
    commutes = all(table[a][b] == table[b][a] for a in range(n) for b in range(n))
    assert commutes == (group == "z60")
    if not commutes:  # A5 is perfect: its commutators generate all of it, so it is not solvable
        inverse = [line.index(0) for line in table]
        commutators = {table[table[a][b]][table[inverse[a]][inverse[b]]] for a in range(n) for b in range(n)}
        assert len(commutators) == 60


@pytest.mark.parametrize("task", [CopyAR(), CopyAR(6, 6, 16), CopyAR(3, 10, 10)], ids=name)
def test_copy_ar_predicts_the_string_and_its_end(task):
    lengths = []
    for inputs, targets in rows(task, n=2000):
        text = task.decode(inputs)
        string, again = re.fullmatch(r"<(\w+)\|(\w+)>?·*", text).groups()
        assert string == again and all(letter in task._names[: task.n_symbols] for letter in string)
        M = len(string)
        assert task.decode(list(scored(targets).values())) == string + ">" and min(scored(targets)) == M + 1
        lengths.append(M - task.shortest)
        following = {at: inputs[at + 1] for at in range(M + 1, min(2 * M + 2, task.seq_len - 1))}
        assert following.items() <= scored(targets).items(), "an answer is the next input"
    assert likely(lengths, task.longest - task.shortest + 1)


def test_the_best_constant_guess_of_copy_ar_is_its_chance():
    task = CopyAR(5, 6, 16)
    _, targets = task.sample("test", torch.arange(20000))
    on = targets != IGNORE
    best = sum(int(targets[:, t][on[:, t]].bincount().max()) for t in range(16) if on[:, t].any())
    assert best / int(on.sum()) == pytest.approx(task.chance_token_accuracy, abs=0.01)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: InductionHeads(1), "n_symbols=1"),
        (lambda: InductionHeads(4, 2), "seq_len=2 < 3"),
        (lambda: AssocRecall(seq_len=40), "seq_len=40 is even"),
        (lambda: MQAR(8191), "vocab_size=8191 is odd"),
        (lambda: MQAR(16, 8, 128), "n_pairs=8 > 7"),
        (lambda: MQAR(8192, 8, 31), "seq_len=31 < 32"),
        (lambda: MQAR(filler="blank"), "filler='blank'"),
        (lambda: MQAR(alpha=0.0), "alpha=0.0"),
        (lambda: Parity(41, 40), "min_len=41 > seq_len=40"),
        (lambda: Parity(score="first"), "score='first'"),
        (lambda: ModularArithmetic(seq_len=41), "seq_len=41 is odd"),
        (lambda: ModularArithmetic(min_len=42), "min_len=42 > seq_len=40"),
        (lambda: WordProblem(group="a4"), "group='a4'"),
        (lambda: CopyAR(seq_len=101), "seq_len=101 is odd"),
        (lambda: CopyAR(min_len=104), "min_len=104 > seq_len=102"),
        (lambda: CopyAR(min_len=5), "min_len=5 is odd"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_number(make, words):
    with pytest.raises(ValueError, match=words):
        make()
