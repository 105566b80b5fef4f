"""HTTP as every server of infer speaks it, an ingress too: who may ask, bodies, errors and long answers. It knows no
engine and no endpoint."""
