// Paged attention of generation windows. window_attention.py describes inputs and outputs,
// window_attention_cuda.py the layout of a launch. Compiled by NVRTC for compute capability 9.0 and
// above.
//
// A cluster of CTAs serves one KV head of one request. The rows of its tile are the window's query
// heads of that KV head's group. Each CTA takes a share of the keys that were in the pool before.
// The last CTA with keys also takes the window's own keys and writes them into the pool. The warps
// of a CTA take blocks of 16 keys round-robin, and copy those of the pool into a ring of their own
// in shared memory, keys and values alternating. Blocks begin at multiples of 16 positions, so one
// may have keys of the pool and of the window, and the order of a row's sums does not depend on
// where its window begins. The softmax is the online softmax in powers of two. At the end the
// results of the warps are joined in shared memory. Then the CTAs exchange their results, and each
// of them finishes a run of the columns.
//
// With one CTA per tile (and more only for very long requests) there are no clusters. Partial
// results then go to global memory, and the reduction of window_attention_triton.py joins them.
//
// Lengths, block tables and the keys and values of earlier tokens do not depend on the projection
// before this kernel (programmatic_launch.py). With programmatic dependent launch their first loads
// start while the projection still runs.
//
// A piece is 16 bytes. Piece c of row r of a tile is stored at c ^ (r % 8), so that the 8 rows that
// are read together use different banks.
//
// Compiler options define BFLOAT16 (otherwise float16), HEAD_DIM (64 or 128), ROW_TILES (of 16 rows
// each), WARPS, DEPTH (tiles of a warp's ring), CTAS (least number per multiprocessor), TREE
// (whether rows see the keys of a tree's region by their bits), SINKS (whether heads have any) and
// CODES (whether the pool has E4M3 numbers, which become 16-bit numbers, exactly, on the way from
// shared memory to tensor cores).

#include "tensor_core.cuh"
#include "window_mixture.cuh"
#include "window_stage.cuh"
#include "window_stream.cuh"

// Shared memory for the results of the CTA's warps, and for those of the other CTAs of the cluster
// in the columns that this CTA finishes.
struct Sums {
    // mixed: [WARPS][ROWS][SUM_STRIDE], in the memory of the rings; the others: [WARPS][ROWS].
    float *mixed, *tops, *totals;
    // received: [splits][ROWS][HEAD_DIM / splits]; the others: [splits][ROWS].
    float *received, *received_tops, *received_totals;

    __device__ void store(Mixture& mixture, int warp, int lane) const {
#pragma unroll
        for (int i = 0; i < 2 * ROW_TILES; ++i) {
            const int row = i / 2 * 16 + i % 2 * 8 + lane / 4;
            float& total = mixture.total[i / 2][i % 2];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            if (lane % 4 == 0) {
                tops[warp * ROWS + row] = mixture.top[i / 2][i % 2];
                totals[warp * ROWS + row] = total;
            }
            const int first = i % 2 * 2;
#if CODES
            float* target = mixed + (warp * ROWS + row) * SUM_STRIDE + lane % 4 * 4;
#pragma unroll
            for (int block = 0; block < HEAD_DIM / 16; ++block) {
                const float(&even)[4] = mixture.mixed[i / 2][2 * block];
                const float(&odd)[4] = mixture.mixed[i / 2][2 * block + 1];
                *reinterpret_cast<float4*>(target + block * 16) =
                    make_float4(even[first], odd[first], even[first + 1], odd[first + 1]);
            }
#else
            float* target = mixed + (warp * ROWS + row) * SUM_STRIDE + lane % 4 * 2;
#pragma unroll
            for (int block = 0; block < HEAD_DIM / 8; ++block) {
                const float(&sum)[4] = mixture.mixed[i / 2][block];
                *reinterpret_cast<float2*>(target + block * 8) =
                    make_float2(sum[first], sum[first + 1]);
            }
#endif
        }
    }
};

// Joins `number` partial results of a row, each relative to its own highest score.
template <int MOST>
__device__ inline float4 joined(
    int number, const float* tops, const float* totals, int step, const float* parts, int part_step,
    float& top, float& total) {
    top = minus_infinity();
    total = 0.0f;
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i < number) top = fmaxf(top, tops[i * step]);
    const float base = finite_base(top);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        if (i >= number) break;
        const float factor = power_of_two(tops[i * step] - base);
        const float4 part = *reinterpret_cast<const float4*>(parts + i * part_step);
        total = fmaf(factor, totals[i * step], total);
        sum.x = fmaf(factor, part.x, sum.x);
        sum.y = fmaf(factor, part.y, sum.y);
        sum.z = fmaf(factor, part.z, sum.z);
        sum.w = fmaf(factor, part.w, sum.w);
    }
    return sum;
}

__device__ inline i64 output_row(const Windows& w, const Part& part, int row) {
    const i64 token = part.first_row + row / w.group;
    return token * w.heads() + part.kv_head * w.group + row % w.group;
}

__device__ inline float inverse(const Windows& w, float total) {
    const float factor = total == 0.0f ? 1.0f : 1.0f / total;
    return CODES ? factor * w.value_scale : factor;
}

__device__ inline void write(
    const Windows& w, const Part& part, int row, int column, float4 sum, float total) {
    const float factor = inverse(w, total);
    const uint2 four =
        make_uint2(pack(sum.x * factor, sum.y * factor), pack(sum.z * factor, sum.w * factor));
    *reinterpret_cast<uint2*>(w.out + output_row(w, part, row) * HEAD_DIM + column) = four;
}

__device__ inline void write_partial(
    const Windows& w, const Part& part, int row, int column, float4 sum, float top, float total) {
    const float factor = inverse(w, total);
    const i64 partial_row = output_row(w, part, row) * w.splits + part.split;
    *reinterpret_cast<float4*>(w.partials + partial_row * HEAD_DIM + column) =
        make_float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor);
    if (column == 0) w.log_sums[partial_row] = top + __log2f(total);
}

// Sends a partial result to the CTA that finishes the column.
__device__ inline void send(
    const Windows& w, const Part& part, const Sums& sums, int row, int column, float4 sum,
    float top, float total) {
    const int columns = HEAD_DIM / w.splits, owner = column / columns;
    const int line = part.split * ROWS + row;
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
        :: "r"(remote_address(sums.received + line * columns + column % columns, owner)),
           "f"(sum.x), "f"(sum.y), "f"(sum.z), "f"(sum.w) : "memory");
    if (column % columns != 0) return;
    asm volatile("st.shared::cluster.f32 [%0], %1;"
        :: "r"(remote_address(sums.received_tops + line, owner)), "f"(top) : "memory");
    asm volatile("st.shared::cluster.f32 [%0], %1;"
        :: "r"(remote_address(sums.received_totals + line, owner)), "f"(total) : "memory");
}

__device__ inline void join_warps(const Windows& w, const Part& part, const Sums& sums) {
    constexpr int FOURS = HEAD_DIM / 4;
    for (int i = threadIdx.x; i < part.num_rows * w.group * FOURS; i += THREADS) {
        const int row = i / FOURS, column = i % FOURS * 4;
        float top, total;
        const float* parts = sums.mixed + row * SUM_STRIDE + column;
        const float4 sum = joined<WARPS>(WARPS, sums.tops + row, sums.totals + row, ROWS, parts,
                                         ROWS * SUM_STRIDE, top, total);
        if (part.num_used == 1) write(w, part, row, column, sum, total);
        else if (w.in_clusters()) send(w, part, sums, row, column, sum, top, total);
        else write_partial(w, part, row, column, sum, top, total);
    }
}

__device__ inline void join_cluster(const Windows& w, const Part& part, const Sums& sums) {
    const int columns = HEAD_DIM / w.splits, fours = columns / 4;
    for (int i = threadIdx.x; i < part.num_rows * w.group * fours; i += THREADS) {
        const int row = i / fours, column = i % fours * 4;
        float top, total;
        const float* parts = sums.received + row * columns + column;
        const float4 sum = joined<8>(part.num_used, sums.received_tops + row,
                                     sums.received_totals + row, ROWS, parts, ROWS * columns, top,
                                     total);
        write(w, part, row, part.split * columns + column, sum, total);
    }
}

// The scores of the sinks of a thread's rows, for weights that are powers of two.
__device__ inline void load_sinks(
    const Windows& w, const Part& part, int lane, float (&sinks)[ROW_TILES][2]) {
#pragma unroll
    for (int i = 0; i < 2 * ROW_TILES; ++i) {
        const int row = 8 * i + lane / 4;
        const float sink = __ldcg(w.sinks + part.kv_head * w.group + row % w.group);
        sinks[i / 2][i % 2] = sink * 1.44269504f;  // log2(e)
    }
}

// Adds the CTA's keys. bits: of the window's tokens, from the first key of a tree's region on.
__device__ inline void attend(
    const Windows& w, const Part& part, Stream& stream, Mixture& mixture, const uint4* queries,
    const uint4* own_keys, const i64* bits) {
    const int lane = stream.lane, end = part.last_block();
    const uint4* own_values = own_keys + w.window * STORED_PIECES;
#pragma unroll 1
    for (int block = stream.first; block < end; block += WARPS) {
        float scores[ROW_TILES][2][4];
        u32 weights[ROW_TILES][4];
        const Line keys(part, stream.take(), own_keys, block, lane / 16 * 8 + lane % 8);
        multiply_keys(scores, queries, keys, lane);
        const int num_present = part.num_keys - block * KEYS;
        const int num_common = part.num_old - block * KEYS - (TREE ? w.offset : 0);
        if (num_common < KEYS)
            hide(scores, lane, [&](int row, int column) {
                const int key = column - num_common;
                const int token = min(row / w.group, part.num_rows - 1);
                if (key < 0) return true;
                if (TREE) return column < num_present && bits[token] >> key & 1;
                return part.first_own + key <= token;
            });
        mixture.weigh(scores, w.scale, weights);
        mixture.add(weights, Line(part, stream.take(), own_values, block, lane % 16), lane);
    }
}

// Grid: tiles (a KV head of a request each) times splits.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS)
window_attention(const __grid_constant__ Windows w) {
    asm volatile("griddepcontrol.launch_dependents;");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Part part(w);
    const bool in_cluster = part.num_used > 1 && w.in_clusters();
    const bool has_keys = part.split < part.num_used;
    if (!in_cluster && !has_keys) return;
    if (in_cluster) cluster_arrive();
    extern __shared__ uint4 shared[];
    uint4 *queries = shared + WARPS * DEPTH * TILE, *own_keys = queries + ROWS * PIECES;
    float* tops = reinterpret_cast<float*>(own_keys + 2 * w.window * STORED_PIECES);
    float* received = tops + 2 * WARPS * ROWS;
    float* received_tops = received + ROWS * HEAD_DIM;
    const Sums sums = {reinterpret_cast<float*>(shared), tops, tops + WARPS * ROWS,
                       received, received_tops, received_tops + w.splits * ROWS};

    Stream stream(w, part, shared + warp * DEPTH * TILE, warp, lane);
    const bool takes_sinks = part.has_window() && warp == 0;
    float sinks[ROW_TILES][2];
    if (SINKS && takes_sinks) load_sinks(w, part, lane, sinks);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (has_keys) {
        Mixture mixture;
        if (SINKS && takes_sinks) mixture.start_with(sinks, lane);
        stage_window(w, part, queries, own_keys);
        i64* bits = reinterpret_cast<i64*>(tops);  // until the sums are stored
        if (TREE && threadIdx.x < part.num_rows)
            bits[threadIdx.x] = w.tree_bits[part.first_row + threadIdx.x];
        __syncthreads();
        attend(w, part, stream, mixture, queries, own_keys, bits);
        __syncthreads();  // the sums overwrite the rings
        sums.store(mixture, warp, lane);
        __syncthreads();
    }
    if (in_cluster) cluster_wait();  // all CTAs of the cluster run: their memory can be written
    if (has_keys) join_warps(w, part, sums);
    if (!in_cluster) return;
    cluster_arrive();
    cluster_wait();
    join_cluster(w, part, sums);
}
