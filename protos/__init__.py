"""Everything that crosses a process boundary. The array messages need numpy only; the generated
stubs are imported by name from `outrider_pb2` and `outrider_pb2_grpc`, so that kernels, drafters
and verifiers stay free of gRPC."""
