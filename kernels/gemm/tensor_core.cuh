// Wrappers of PTX instructions: pairs of 16-bit floats, tensor cores, shared memory, clusters.
// Compiler options define BFLOAT16 (otherwise float16).
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef long long i64;

__device__ inline float2 unpack(u32 pair) {
    float2 result;
#if BFLOAT16
    result.x = __uint_as_float(pair << 16);
    result.y = __uint_as_float(pair & 0xffff0000u);
#else
    asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
        : "=f"(result.x), "=f"(result.y) : "r"(pair));
#endif
    return result;
}

__device__ inline u32 pack(float low, float high) {
    u32 pair;
#if BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
}

#if BFLOAT16
#define PAIR "bf16x2"
#define MMA_TYPES "f32.bf16.bf16.f32"
#else
#define PAIR "f16x2"
#define MMA_TYPES "f32.f16.f16.f32"
#endif

__device__ inline u32 product(u32 a, u32 b) {
    u32 pair;
    asm("mul.rn." PAIR " %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

// Four E4M3 numbers to two pairs of 16-bit floats, exactly: of bytes 0 and 2, and of bytes 1 and 3.
// A bfloat16 is 2^-120 times the number, whose bits are moved to those with the same sign: the
// biases of the exponents are 7 and 127. The same holds for subnormal numbers.
__device__ inline void move_fp8(u32 four, u32& even, u32& odd) {
#if BFLOAT16
    even = four << 8 & 0x80008000 | four << 4 & 0x07f007f0;
    odd = four & 0x80008000 | four >> 4 & 0x07f007f0;
#else
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2;"
        " cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(even), "=r"(odd) : "r"(__byte_perm(four, 0, 0x3120)));
#endif
}
// The same without a factor. NaN becomes 480 in bfloat16.
__device__ inline void widen_fp8_alternating(u32 four, u32& even, u32& odd) {
    move_fp8(four, even, odd);
#if BFLOAT16
    even = product(even, 0x7b807b80);  // 2^120
    odd = product(odd, 0x7b807b80);
#endif
}

// sum += a b, 16 x 16 times 16 x 8.
__device__ inline void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col." MMA_TYPES
        " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Loads four blocks of 8 x 8 elements. Lanes 8 i to 8 i + 7 give the addresses of block i's rows.
__device__ inline void load_blocks(u32 (&blocks)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3]) : "r"(row));
}
__device__ inline void load_blocks(u32 (&blocks)[4], const uint4* row) {
    load_blocks(blocks, shared_address(row));
}
__device__ inline u32 load_word(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
}
__device__ inline uint2 load_pairs(u32 address) {
    uint2 pairs;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(pairs.x), "=r"(pairs.y) : "r"(address));
    return pairs;
}
__device__ inline void load_transposed_blocks(u32 (&blocks)[4], const uint4* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(blocks[0]), "=r"(blocks[1]), "=r"(blocks[2]), "=r"(blocks[3])
        : "r"(shared_address(row)));
}

// The value, which the compiler then keeps in a register instead of computing it again.
__device__ inline u32 opaque(u32 value) { return __shfl_sync(~0u, value, threadIdx.x % 32); }

__device__ inline u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The address of the same variable in the shared memory of another CTA of the cluster.
__device__ inline u32 remote_address(const void* pointer, int rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(remote) : "r"(shared_address(pointer)), "r"(rank));
    return remote;
}
