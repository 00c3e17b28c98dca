// A memset of a few elements as a kernel of one CTA.

extern "C" __global__ void fill(
    void *first, unsigned long long count, unsigned value, unsigned element_size) {
  for (unsigned long long i = threadIdx.x; i < count; i += blockDim.x) {
    if (element_size == 4)
      static_cast<unsigned *>(first)[i] = value;
    else if (element_size == 2)
      static_cast<unsigned short *>(first)[i] = static_cast<unsigned short>(value);
    else
      static_cast<unsigned char *>(first)[i] = static_cast<unsigned char>(value);
  }
}
