from torch import nn

from accumulus.equivalence import remedies


def test_every_remedy_is_one_sentence():
    for name, text in vars(remedies).items():
        if name.isupper() and isinstance(text, str):
            assert text.endswith("."), name
            assert ". " not in text.replace("acc.", ""), name


def test_a_router_is_known_by_its_term_or_its_tensors():
    model = nn.Linear(2, 2)
    assert remedies.is_routing(model, "load_balancing", ())
    assert remedies.is_routing(model, "loss", ("mlp.gate (Linear)",))
    assert remedies.is_routing(model, "loss", ("model (MixtralModel).router_logits.0",))
    assert not remedies.is_routing(model, "loss", ("head (Linear)",))
