"""What tests of the operator put around it: a proxy that does harm, a quick KubeRay."""
